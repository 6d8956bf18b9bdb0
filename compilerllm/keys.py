"""Semantic keys: every thing that an artifact depends on, as a field with a name, and nothing that it does not.

A field's value is JSON. What cannot change the artifact (host, path, working directory, ports, environment, the order of
flags and of ``config.json``) is in no field; where two keys differ, the fields that differ say why.
"""

import hashlib
import importlib.metadata
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compilerllm import __version__
from compilerllm.artifact import FORMAT, key_digest
from compilerllm.description import Fields, describe_model, flatten, resolve_dtype, resolve_task
from compilerllm.environment import cache_dir
from compilerllm.kernels.cpu.target import CpuTarget
from compilerllm.kernels.triton.target import CudaTarget
from compilerllm.kernels.tuning import CHOICE_LEVEL, tuning_digest

if TYPE_CHECKING:
    from compilerllm.compiler import CompileRequest


@dataclass(frozen=True)
class Key:
    """``digest`` names the artifact in the cache (32 hex digits); ``fields`` are what it is the hash of."""

    digest: str
    fields: Fields

    @staticmethod
    def of(fields: Mapping[str, Any]) -> "Key":
        flat = flatten(fields)
        return Key(key_digest(flat), flat)

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
        "task": resolve_task(request.runner, place),
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
        fields["candidates"] = request.candidates if request.level >= CHOICE_LEVEL else 1
        if request.rivals:
            fields["rivals"] = request.rivals
    return Key.of(fields)


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
    names = ("artifact", "building", "compiler", "planning", "cuda_artifact" if on_gpu else "cpu_artifact")
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
