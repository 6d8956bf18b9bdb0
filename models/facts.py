"""What serving must know of a model, and nothing else: the part of a checkpoint that goes into the manifest."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from compilerllm.models.errors import InvalidCheckpoint

_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


@dataclass(frozen=True)
class ModelFacts:
    """Facts of one model. ``max_positions`` counts tokens; ``windows`` are the sliding windows its layers use, in tokens.

    ``eos_token_ids`` end a sequence; ``sampling`` are the defaults its authors recommend.
    """

    name: str
    architecture: str
    dtype: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    max_positions: int
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    pad_token_id: int | None
    windows: tuple[int, ...]
    sampling: Mapping[str, float]

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"eos_token_ids": list(self.eos_token_ids), "windows": list(self.windows)}

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> "ModelFacts":
        lists = {k: tuple(data[k]) for k in ("eos_token_ids", "windows")}
        return ModelFacts(**{**data, **lists})


def generation_config(folder: Path | None) -> dict[str, Any]:
    """What ``generation_config.json`` says; nothing where there is none. Raises ``InvalidCheckpoint``."""
    path = folder / "generation_config.json" if folder is not None else None
    if path is None or not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InvalidCheckpoint(
            f"{path} is no valid JSON ({error}); download it again, or delete it"
        ) from error
    return found if isinstance(found, dict) else {}


def ids(value: Any) -> tuple[int, ...]:
    """One token id, several, or none."""
    if value is None:
        return ()
    return tuple(int(v) for v in value) if isinstance(value, list | tuple) else (int(value),)


def max_positions(config: Any) -> int:
    """Positions the captured rotary table is right for: models that stretch their frequencies past a trained length are
    captured with those for up to that length."""
    limit = int(getattr(config, "max_position_embeddings", None) or 1 << 20)
    rope = getattr(config, "rope_parameters", None) or {}
    parts = [rope, *(v for v in rope.values() if isinstance(v, dict))]
    for part in parts:
        if part.get("rope_type") == "longrope":
            limit = min(limit, int(part.get("original_max_position_embeddings") or limit))
    return limit


def model_facts(
    name: str, config: Any, dtype: str, windows: tuple[int, ...], generation: Mapping[str, Any]
) -> ModelFacts:
    text = config.get_text_config()
    eos = dict.fromkeys((*ids(generation.get("eos_token_id")), *ids(getattr(text, "eos_token_id", None))))
    return ModelFacts(
        name=name, architecture=str(text.model_type), dtype=dtype, vocab_size=int(text.vocab_size),
        hidden_size=int(text.hidden_size), num_layers=int(text.num_hidden_layers), max_positions=max_positions(text),
        eos_token_ids=tuple(eos), bos_token_id=next(iter(ids(getattr(text, "bos_token_id", None))), None),
        pad_token_id=next(iter(ids(getattr(text, "pad_token_id", None))), None), windows=windows,
        sampling={k: generation[k] for k in _SAMPLING if isinstance(generation.get(k), int | float)},
    )  # fmt: skip
