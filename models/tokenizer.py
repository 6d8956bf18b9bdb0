"""A checkpoint's tokenizer as files that serving reads without transformers.

``tokenizer.json`` (for the ``tokenizers`` package), ``tokenizer_config.json``, ``chat_template.jinja`` where the model
has one, and ``generation_config.json``.
"""

import json
import shutil
from pathlib import Path

from tokenizers import Tokenizer as RawTokenizer

from compilerllm.kernels.launch.files import GgufFile
from compilerllm.models.errors import InvalidCheckpoint, first_line
from compilerllm.models.resolve import ResolvedCheckpoint

_COPIED = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
    "chat_template.json", "generation_config.json",
)  # fmt: skip
# Tokens that end an assistant's turn in chat models whose file names only the end of the text.
_TURN_ENDS = ("<end_of_turn>", "<|im_end|>", "<|eot_id|>", "<|end|>")


def export_tokenizer(checkpoint: ResolvedCheckpoint, folder: Path) -> bool:
    """Write the tokenizer's files into ``folder``; False where the checkpoint has none (a bare configuration).

    Raises ``InvalidCheckpoint`` where a tokenizer is there but cannot be used.
    """
    if checkpoint.path is None:
        return False
    folder.mkdir(parents=True, exist_ok=True)
    if checkpoint.kind == "gguf":
        _from_gguf(checkpoint.path, folder)
        return True
    for name in _COPIED:
        if (checkpoint.path / name).is_file():
            _check(checkpoint.path / name)
            shutil.copyfile(checkpoint.path / name, folder / name)
    if (folder / "tokenizer.json").is_file():
        return True
    if not any(
        (checkpoint.path / n).is_file()
        for n in ("tokenizer.model", "vocab.json", "vocab.txt", "tokenizer_config.json")
    ):
        return False
    _save(str(checkpoint.path), folder, None)
    return True


def _check(file: Path) -> None:
    """Find a damaged file now, while it is the user's that can be named. Raises ``InvalidCheckpoint``."""
    try:
        text = file.read_text(encoding="utf-8")
        if file.name == "tokenizer.json":
            RawTokenizer.from_str(text)
        elif file.suffix == ".json":
            json.loads(text)
    except Exception as error:  # the tokenizers package raises bare ones for whatever it cannot read
        raise InvalidCheckpoint(f"{file} cannot be read: {first_line(error)}; download it again") from error


def _save(source: str, folder: Path, gguf_file: str | None) -> None:
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(source, **({"gguf_file": gguf_file} if gguf_file else {}))
    except (ValueError, OSError, KeyError, ImportError, AttributeError, TypeError) as error:
        raise InvalidCheckpoint(
            f"{source}: the tokenizer cannot be read ({first_line(error).rstrip(':')}); give it a tokenizer.json, as "
            "transformers' tokenizer.save_pretrained writes it"
        ) from error
    try:
        tokenizer.save_pretrained(folder)
    except OSError:
        raise
    except Exception as error:  # the tokenizers package raises bare ones where it cannot write
        raise OSError(f"{folder}: {first_line(error)}") from error
    if not (folder / "tokenizer.json").is_file():
        raise InvalidCheckpoint(
            f"{source} has no tokenizer.json and none can be made from its tokenizer; convert it first"
        )


def _from_gguf(path: Path, folder: Path) -> None:
    _save(str(path.parent), folder, path.name)
    file = GgufFile(path)
    template = file.metadata.get("tokenizer.chat_template")
    if template and not (folder / "chat_template.jinja").is_file():
        (folder / "chat_template.jinja").write_text(template)
    generation = gguf_generation(file)
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")


def gguf_generation(file: GgufFile) -> dict[str, object]:
    """What a generation configuration would say: ids that begin and end a text, those that end a turn among them."""
    meta = file.metadata
    ends = [meta.get("tokenizer.ggml.eos_token_id"), meta.get("tokenizer.ggml.eot_token_id")]
    kinds = file.array("tokenizer.ggml.token_type")
    if meta.get("tokenizer.chat_template") or None in ends:
        tokens = file.array("tokenizer.ggml.tokens")
        control = {t: i for i, t in enumerate(tokens) if i < len(kinds) and kinds[i] in (3, 4)}
        ends += [control[t] for t in _TURN_ENDS if t in control]
    found = list(dict.fromkeys(e for e in ends if e is not None))
    result: dict[str, object] = {"eos_token_id": found}
    for key, name in (("bos_token_id", "bos_token_id"), ("padding_token_id", "pad_token_id")):
        if meta.get(f"tokenizer.ggml.{key}") is not None:
            result[name] = meta[f"tokenizer.ggml.{key}"]
    return result
