"""What a checkpoint says of itself, as named fields: configuration, text files, tensors; never the weights' values.

Nothing of where it lies, how its JSON is spelled, or which version of transformers saved it.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from compilerllm.artifact import canonical_json, file_sha256
from compilerllm.kernels.launch.files import GgufFile, read_safetensors

# What transformers notes down of where and how a file was saved.
_NOTES = frozenset(
    ("_name_or_path", "name_or_path", "_commit_hash", "transformers_version", "tokenizer_file")
)
# Files that say how text becomes tokens and back, beside config.json. The large ones are hashed as they are.
_TEXT_FILES = (
    "added_tokens.json", "chat_template.jinja", "chat_template.json", "generation_config.json", "merges.txt",
    "special_tokens_map.json", "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt",
    "modules.json", "1_Pooling/config.json", "sentence_bert_config.json",
)  # fmt: skip
_HASHED_AS_THEY_ARE = ("tokenizer.json", "vocab.json")
_GGUF_SAYS = (
    "general.architecture",
    "general.name",
)  # transformers reads both; the other general.* are for people
_DTYPES = {"float32": "float32", "bfloat16": "bfloat16", "float16": "float16"} | {
    "f32": "float32", "bf16": "bfloat16", "f16": "float16"
}  # fmt: skip
Fields = dict[str, Any]


def describe_model(place: Path, tensors: bool = True) -> Fields:
    """What a checkpoint says of itself: kind, configuration, tokenizer, and its tensors' names, types and shapes.

    Never the weights' values. Raises ``WeightError`` for a file that is damaged.
    """
    if place.is_file() and place.suffix == ".gguf":
        return _describe_gguf(GgufFile(place), tensors)
    described: Fields = {"kind": "hf", "config": _config(place)}
    if text := _text_files(place):
        described["text"] = text
    if tensors:
        described["tensors"] = _tensors(
            (name, info.dtype, info.shape)
            for path in sorted(place.glob("*.safetensors"))
            for name, info in read_safetensors(path)[1].items()
        )
    return described


def flatten(fields: Mapping[str, Any], prefix: str = "") -> Fields:
    """Nested fields as one level, names joined by dots; lists stay values."""
    flat: Fields = {}
    for name, value in fields.items():
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat


def differing(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """Fields whose values differ: name, old value, new value, by name; None stands for a field that is not there."""
    return [(n, old.get(n), new.get(n)) for n in sorted(old.keys() | new.keys()) if old.get(n) != new.get(n)]


def _describe_gguf(file: GgufFile, tensors: bool) -> Fields:
    said = {k: v for k, v in file.metadata.items() if k in _GGUF_SAYS or not k.startswith("general.")}
    config = {
        k: v if len(str(v)) < 200 else hashlib.sha256(str(v).encode()).hexdigest() for k, v in said.items()
    }
    vocabulary = {k: v for k, v in file.array_hashes().items() if not k.startswith("general.")}
    described: Fields = {"kind": "gguf", "config": config, "text": vocabulary}
    if tensors:
        described["tensors"] = _tensors((i.name, i.dtype, i.shape) for i in file.tensors.values())
    return described


def _tensors(infos: Iterator[tuple[str, str, tuple[int, ...]]]) -> Fields:
    found = sorted((name, dtype, list(shape)) for name, dtype, shape in infos)
    return {"count": len(found), "digest": hashlib.sha256(canonical_json(found)).hexdigest()}


def _config(place: Path) -> Any:
    """config.json without notes, and without the stored type, which ``dtype`` and the tensors tell."""
    found = _read_json(place / "config.json")
    if not isinstance(found, dict):
        return found
    found = without_notes(found)
    for part in (found, found.get("text_config")):
        if isinstance(part, dict):
            part.pop("dtype", None), part.pop("torch_dtype", None)
    return found


def without_notes(value: Any) -> Any:
    """JSON without what transformers notes of where and by which version it was saved."""
    if isinstance(value, dict):
        return {k: without_notes(v) for k, v in value.items() if k not in _NOTES}
    return [without_notes(v) for v in value] if isinstance(value, list) else value


def _text_files(place: Path) -> dict[str, str]:
    found = {}
    for name in _TEXT_FILES:
        path = place / name
        if not path.is_file():
            continue
        if path.suffix == ".json" and name not in _HASHED_AS_THEY_ARE:
            found[name] = hashlib.sha256(canonical_json(without_notes(_read_json(path)))).hexdigest()
        else:
            found[name] = file_sha256(path)
    return found


def _read_json(path: Path) -> Any:
    """Parsed, or the hash of what does not parse: whoever builds from it says what is wrong with it."""
    if not path.is_file():
        return None
    try:
        return json.loads(path.read_bytes())
    except ValueError:
        return file_sha256(path)


def resolve_dtype(asked: str, place: Path) -> str:
    """``auto`` as the type it stands for: what config.json says, else float32; bfloat16 for a GGUF file."""
    if asked != "auto":
        return asked
    if place.is_file():
        return "bfloat16"
    config = _read_json(place / "config.json")
    if not isinstance(config, dict):
        return "float32"
    text = config.get("text_config")
    for part in (config, text if isinstance(text, dict) else {}):
        if own := part.get("dtype") or part.get("torch_dtype"):
            return _DTYPES.get(str(own).removeprefix("torch."), "float32")
    return "float32"


def resolve_task(runner: str, place: Path) -> str:
    """What a model is for: ``generate``, ``embed`` or ``classify``. runner: ``auto`` goes by the model's own files."""
    config = None if place.is_file() else _read_json(place / "config.json")
    names = config.get("architectures") if isinstance(config, dict) else None
    name = str(names[0]) if isinstance(names, list) and names else ""
    classifies = name.endswith("ForSequenceClassification")
    if runner == "generate":
        return "generate"
    if runner == "pooling":
        return "classify" if classifies else "embed"
    if classifies:
        return "classify"
    bare = name.endswith(("Model", "ForMaskedLM", "ForPreTraining")) and not name.endswith("LMHeadModel")
    embeds = bare or (place / "modules.json").is_file()
    return "embed" if embeds else "generate"
