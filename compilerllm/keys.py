"""Semantic keys: every thing that an artifact depends on, as a field with a name, and nothing that it does not.

A field's value is JSON. What cannot change the artifact (host, path, working directory, ports, environment, the order of
flags and of ``config.json``) is in no field; where two keys differ, the fields that differ say why.
"""

import hashlib
import importlib.metadata
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compilerllm import __version__
from compilerllm.artifact import FORMAT, canonical_json, file_sha256
from compilerllm.environment import cache_dir
from compilerllm.kernels.cpu.target import CpuTarget
from compilerllm.kernels.launch.files import GgufFile, read_safetensors
from compilerllm.kernels.triton.target import CudaTarget
from compilerllm.kernels.tuning import tuning_digest

if TYPE_CHECKING:
    from compilerllm.compiler import CompileRequest

# What transformers notes down of where and how a file was saved.
_NOTES = frozenset(
    ("_name_or_path", "name_or_path", "_commit_hash", "transformers_version", "tokenizer_file")
)
# Files that say how text becomes tokens and back, beside config.json. The large ones are hashed as they are.
_TEXT_FILES = (
    "added_tokens.json", "chat_template.jinja", "chat_template.json", "generation_config.json", "merges.txt",
    "special_tokens_map.json", "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt",
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


@dataclass(frozen=True)
class Key:
    """``digest`` names the artifact in the cache (32 hex digits); ``fields`` are what it is the hash of."""

    digest: str
    fields: Fields

    @staticmethod
    def of(fields: Mapping[str, Any]) -> "Key":
        flat = dict(_flat(fields))
        return Key(hashlib.sha256(canonical_json(flat)).hexdigest()[:32], flat)

    def to_json(self) -> dict[str, Any]:
        """What the manifest holds."""
        return {"digest": self.digest, "fields": self.fields}


def semantic_key(request: "CompileRequest", target: CpuTarget | CudaTarget, place: Path) -> Key:
    """The key of what ``request`` asks for, of the checkpoint at ``place``, with this version and these tools."""
    on_gpu = isinstance(target, CudaTarget)
    model = describe_model(place, tensors=request.load_format == "auto")
    fields: Fields = {
        "format": FORMAT,
        "version": __version__,
        "sources": source_digests(on_gpu),
        "tools": tool_versions(on_gpu, model["kind"]),
        "model": model,
        "target": target.name,
        "level": request.level,
        "dtype": resolve_dtype(request.dtype, place),
        "weights": "packed"
        if model["kind"] == "gguf" and request.weights != "dense" and not on_gpu
        else "dense",
        "load_format": request.load_format,
        "max_model_len": request.max_model_len,
        "max_num_seqs": request.max_num_seqs,
        "max_num_batched_tokens": request.max_num_batched_tokens,
        "passes": {"skip": sorted(set(request.skip_passes))},
    }
    if isinstance(target, CudaTarget):
        fields["tuning"] = tuning_digest(target, cache_dir() / "tuning")
    return Key.of(fields)


def differing(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """Fields whose values differ: name, old value, new value, by name; None stands for a field that is not there."""
    return [(n, old.get(n), new.get(n)) for n in sorted(old.keys() | new.keys()) if old.get(n) != new.get(n)]


def _flat(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, inner in value.items():
        if isinstance(inner, Mapping) and inner:
            yield from _flat(inner, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", inner


# The model


def describe_model(place: Path, tensors: bool = True) -> Fields:
    """What a checkpoint says of itself: kind, configuration, tokenizer, and its tensors' names, types and shapes.

    Never the weights' values. Raises ``WeightError`` for a file that is damaged.
    """
    if place.is_file() and place.suffix == ".gguf":
        return _describe_gguf(GgufFile(place), tensors)
    described: Fields = {"kind": "hf", "config": _config(place), "text": _text_files(place)}
    if tensors:
        described["tensors"] = _tensors(
            (name, info.dtype, info.shape)
            for path in sorted(place.glob("*.safetensors"))
            for name, info in read_safetensors(path)[1].items()
        )
    return described


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


# The compiler


def tool_versions(on_gpu: bool, kind: str) -> dict[str, str]:
    """Versions of the packages that take part in a build."""
    names = ["torch", "transformers", "tokenizers"]
    names += ["triton"] if on_gpu else []
    names += ["gguf"] if kind == "gguf" else []
    return {name: importlib.metadata.version(name) for name in names}


@cache
def source_digests(on_gpu: bool) -> dict[str, str]:
    """Hashes of the compiler's own source files, by part; the other kind of target's code generator is left out."""
    from compilerllm import ir, kernels, models, passes

    here = Path(__file__).parent
    other = ("cpu", "reference") if on_gpu else ("triton", "cutlass", "reference")
    names = ("artifact", "compiler", "planning", "cuda_artifact" if on_gpu else "cpu_artifact")
    found = {"driver": _hash_files(here, [here / f"{name}.py" for name in names])}
    for part, package in (("ir", ir), ("passes", passes), ("models", models), ("kernels", kernels)):
        root = Path(str(package.__file__)).parent
        paths = [p for p in root.rglob("*") if p.suffix in (".py", ".h", ".cpp", ".in", ".cu", ".cuh")]
        skipped = other if part == "kernels" else ()
        kept = [p for p in paths if p.relative_to(root).parts[0] not in skipped]
        found[part] = _hash_files(root, kept)
    return found


def _hash_files(root: Path, paths: list[Path]) -> str:
    digest = hashlib.sha256()
    for path in sorted(paths):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()
