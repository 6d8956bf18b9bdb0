"""The compile driver: checkpoint to artifact, in a child process of whoever needs it.

``ensure_artifact`` is what serving calls: it computes the key from small files, finds the artifact or has a child build
it. ``build`` is the child's work and imports the compiler; nothing else here does.
"""

import dataclasses
import json
import logging
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from compilerllm import __version__
from compilerllm.artifact import ArtifactInvalid, artifact_path, building, write_log, write_manifest
from compilerllm.cache import discard, explain_miss, is_usable
from compilerllm.config import EngineConfig
from compilerllm.cpu_artifact import write_cpu
from compilerllm.environment import cache_dir
from compilerllm.errors import CompilerLLMError
from compilerllm.ir.step import Bucket
from compilerllm.kernels.cpu.target import CpuTarget, UnknownTarget, find_target
from compilerllm.kernels.triton.target import TARGETS as CUDA_TARGETS
from compilerllm.kernels.triton.target import CudaTarget, find_cuda_target
from compilerllm.keys import Key, semantic_key
from compilerllm.targets import is_cuda, target_name

if TYPE_CHECKING:
    from compilerllm.ir.graph import Module

# What a build goes through, with the share of its time each usually takes, for the progress bar.
STAGES = {
    "resolve": 0.3,
    "capture": 0.25,
    "passes": 0.05,
    "measure": 0.0,
    "generate": 0.05,
    "compile": 0.2,
    "opaque": 0.0,
    "save": 0.15,
}
OnStage = Callable[[str], None]
_log = logging.getLogger(__name__)


class CompileFailed(CompilerLLMError):
    """The build child ended with an error; the message is the child's. Its traceback, if any, is this one's note."""

    def __init__(self, message: str, printed: str = "") -> None:
        super().__init__(message)
        if printed:
            self.add_note(f"The compiler's process printed:\n{printed}")


class UnsupportedWeights(CompilerLLMError):
    """Weights in a form that the target's kernels do not read."""


@dataclass(frozen=True)
class CompileRequest:
    """Everything an artifact depends on, apart from the tools' versions."""

    model: str
    dtype: str = "auto"
    weights: str = "auto"
    level: int = 2
    target: str = "cpu"
    max_model_len: int | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    load_format: Literal["auto", "dummy", "config"] = "auto"
    skip_passes: tuple[str, ...] = ()

    @staticmethod
    def from_json(data: dict[str, Any]) -> "CompileRequest":
        """From what ``dataclasses.asdict`` gave, by way of JSON."""
        return CompileRequest(**data | {"skip_passes": tuple(data.get("skip_passes", ()))})

    @staticmethod
    def of(config: EngineConfig, target: str | None = None) -> "CompileRequest":
        """The part of an engine's configuration that is compiled in; ``target`` in place of the device's own."""
        return CompileRequest(
            config.model.model, config.model.dtype, config.model.weights, config.model.optimization_level,
            target or target_name(config.model.device),
            config.model.max_model_len, config.scheduler.max_num_seqs, config.scheduler.max_num_batched_tokens,
            config.model.load_format,
        )  # fmt: skip


def find_build_target(name: str) -> CpuTarget | CudaTarget:
    """The target called ``name``: "cpu" (this machine's best), a CPU target, or sm_90 and its like.

    Raises ``UnknownTarget``, ``UnknownCudaTarget``.
    """
    if is_cuda(name):
        return find_cuda_target(name)
    try:
        return find_target(name)
    except UnknownTarget as error:
        raise UnknownTarget(
            f"{error}; for GPUs there are {', '.join(t.name for t in CUDA_TARGETS)}"
        ) from None


def make_buckets(max_num_seqs: int, max_tokens: int) -> tuple[Bucket, ...]:
    """Decode buckets at powers of two, then mixed steps by tokens, any row of which may be sampled.

    Programs run a step's exact sizes; a bucket bounds the memory they are planned with.
    """
    powers = [1 << i for i in range(max_num_seqs.bit_length()) if 1 << i < max_num_seqs]
    decode = [Bucket(s, s, s, 1) for s in (*powers, max_num_seqs)]
    tokens = [t for t in (64, 256, 1024, 4096, 16384) if t < max_tokens] + [max_tokens]
    return (*decode, *(Bucket(t, min(t, max_num_seqs), t, t) for t in tokens))


def artifact_key(request: CompileRequest, place: Path) -> Key:
    """The key of what is asked for: what the model says of itself, how it is compiled, the tools' versions.

    Raises ``UnknownTarget``, ``UnknownCudaTarget``, ``UnsupportedWeights``, and the weight files' errors.
    """
    target = find_build_target(request.target)
    if isinstance(target, CudaTarget) and request.weights == "packed":
        raise UnsupportedWeights(
            "--weights packed: CUDA kernels read dense weights only. Leave it out, or say --weights dense."
        )
    return semantic_key(request, target, place)


@dataclass(frozen=True)
class Found:
    """An artifact and how it was come by. why: where it was built, how the nearest one of the cache differed."""

    path: Path
    hit: bool
    seconds: float
    why: str = ""


def ensure_artifact(request: CompileRequest, place: Path, on_stage: OnStage | None = None) -> Found:
    """The artifact for ``request``, built in a child process where the cache has none. Raises ``CompileFailed``.

    An interruption of this process, by Ctrl-C or a signal handler that raises, ends the child too.
    """
    start = time.perf_counter()
    key = artifact_key(request, place)
    path = artifact_path(key.digest)
    try:
        if is_usable(path):
            return Found(path, True, time.perf_counter() - start)
        why = explain_miss(key.fields)
    except ArtifactInvalid as error:
        why = f"the one of the cache is damaged: {error}"
        _log.warning("%s is built again: %s", key.digest, why)
        discard(path)
    _log.info("%s is built for %s: %s", key.digest, key.fields["target"], why)
    order = json.dumps(dataclasses.asdict(request))
    # -P: what lies in the working directory is no module
    run_child([sys.executable, "-P", "-m", "compilerllm.compiler", order, str(place)], on_stage)
    if not is_usable(path):
        path = artifact_path(artifact_key(request, place).digest)  # what was measured meanwhile is part of it
        if not is_usable(path):
            raise CompileFailed(f"the compiler ended well but left no artifact in {path}")
    return Found(path, False, time.perf_counter() - start, why)


def run_child(command: list[str], on_stage: OnStage | None = None) -> None:
    """Run a process that reports as ``main`` does, to its end. Raises ``CompileFailed`` with what it says."""
    message = ""
    # A file, since nobody reads a pipe for errors before the child ends, and Inductor may write more than one holds.
    with tempfile.TemporaryFile("w+") as errors:
        child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
        assert child.stdout is not None
        try:
            for line in child.stdout:
                kind, _, text = line.rstrip("\n").partition(" ")
                if kind == "stage" and on_stage is not None:
                    on_stage(text)
                elif kind == "error":
                    message = json.loads(text)
            status = child.wait()
        except BaseException:
            _end(child)
            raise
        errors.seek(0)
        printed = errors.read().strip()[-4000:]
    if status < 0:
        raise CompileFailed(
            f"the compiler's process was killed by {signal.Signals(-status).name}. SIGKILL often means that memory "
            "ran out: free some, or compile on a machine with more and copy the cache.",
            printed,
        )
    if status != 0:
        last = printed.splitlines()[-1] if printed else "it said nothing"
        raise CompileFailed(message or f"the compiler ended with exit code {status}: {last}", printed)


def _end(child: "subprocess.Popen[str]") -> None:
    """End a build: at SIGTERM it removes what it has begun, which takes as long as a C++ compiler may be running."""
    child.terminate()
    try:
        child.wait(10)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


def build(request: CompileRequest, place: Path, on_stage: OnStage = lambda stage: None) -> Path:
    """Compile ``place`` into the cache; gives the artifact. Imports the compiler; errors are the parts' own."""
    from compilerllm.ir.recipe import print_recipe
    from compilerllm.ir.text import print_module
    from compilerllm.passes.pipeline import Options, run_pipeline

    seconds: dict[str, float] = {}
    started, running = time.perf_counter(), ""

    def stage(name: str) -> None:
        nonlocal started, running
        now = time.perf_counter()
        if running:
            seconds[running] = seconds.get(running, 0.0) + now - started
        started, running = now, name.partition(" ")[0]  # "compile 12/80" goes on with compile
        if name:
            on_stage(name)

    stage("resolve")  # importing transformers is a good part of it
    from compilerllm.models.model import capture_checkpoint
    from compilerllm.models.resolve import resolve
    from compilerllm.models.tokenizer import export_tokenizer

    key, target = artifact_key(request, place), find_build_target(request.target)
    # The type that the key says, so that they cannot differ.
    checkpoint = resolve(str(place), dtype=key.fields["dtype"], load_format=request.load_format)
    stage("capture")
    on_gpu = isinstance(target, CudaTarget)
    captured = capture_checkpoint(checkpoint, keep_packed=request.weights != "dense" and not on_gpu)
    stage("passes")
    options = Options(level=request.level, target=target.name, skip=frozenset(request.skip_passes))
    module, reports = run_pipeline(captured.module, options)
    if isinstance(target, CudaTarget) and _measures(module, target, request, stage):
        key = artifact_key(request, place)  # of what is known now
    with building(key.digest) as folder:
        if request.level == 0:
            stage("save")
            buckets = make_buckets(request.max_num_seqs, request.max_num_batched_tokens)
            manifest: dict[str, Any] = {"program": None, "features": []}
        elif isinstance(target, CudaTarget):
            from compilerllm.cuda_artifact import cuda_buckets, write_cuda

            buckets = cuda_buckets(request.max_num_seqs, request.max_num_batched_tokens)
            manifest = write_cuda(
                module, target, buckets, request.level, captured.facts.vocab_size, folder, stage
            )
        else:
            buckets = make_buckets(request.max_num_seqs, request.max_num_batched_tokens)
            module, manifest = write_cpu(module, target, buckets, request.level, folder, stage)
            manifest["features"] = sorted(target.features)
        (folder / "captured.ir").write_text(print_module(captured.module, origins=True))
        (folder / "module.ir").write_text(print_module(module, origins=True))
        facts = captured.facts
        has_tokenizer = export_tokenizer(checkpoint, folder / "tokenizer")
        manifest |= {
            "version": __version__, "key": key.to_json(), "target": target.name, "level": request.level,
            "facts": facts.to_json() | {"name": ""}, "source": captured.weights.to_json() | {"path": ""},
            "tokenizer": has_tokenizer, "vocab_size": facts.vocab_size,
            "max_model_len": min(request.max_model_len or facts.max_positions, facts.max_positions),
            "buckets": [dataclasses.asdict(b) for b in buckets],
            "parameters": [
                {"name": p.name, "dtype": p.type.dtype, "shape": list(p.type.shape), "recipe": print_recipe(p.recipe)}
                for p in captured.names.bind_all(module)
            ],
            "passes": [
                {"pass": r.name, "function": r.function, "matches": r.matches,
                 "near_misses": [str(m) for m in r.near_misses], "counts": r.counts}
                for r in reports
            ],
        }  # fmt: skip
        stage("")
        write_manifest(folder, manifest)
    path = artifact_path(key.digest)
    write_log(
        path,
        {
            "model": _name(request.model),
            "seconds": {k: round(v, 3) for k, v in seconds.items()},
            "passes": [
                {"pass": r.name, "function": r.function, "seconds": round(r.seconds, 6)} for r in reports
            ],
        },
    )
    return path


def _name(model: str) -> str:
    """What to call a model where artifacts are listed: the last part of a path, a hub id as it is."""
    path = Path(model).expanduser()
    return path.resolve().name.removesuffix(".gguf") if path.exists() else model


def _measures(module: "Module", target: CudaTarget, request: CompileRequest, stage: OnStage) -> bool:
    """At O3, on the target's own machine: time candidates that no tuning data has. Whether there were any."""
    from compilerllm.cuda_artifact import cuda_buckets
    from compilerllm.kernels.cutlass.build import find_supply
    from compilerllm.kernels.triton.emit import cutlass_cache
    from compilerllm.measuring import LEVEL, measure_missing

    if request.level < LEVEL:
        return False
    stage("measure")
    buckets = cuda_buckets(request.max_num_seqs, request.max_num_batched_tokens)
    return measure_missing(
        module, target, buckets, find_supply(cutlass_cache(cache_dir() / "kernels")), stage
    )


def main(arguments: list[str]) -> int:
    """The child: one JSON request, a place; reports stages and a last error on stdout."""
    from compilerllm.ir.errors import IRError
    from compilerllm.kernels.errors import KernelError

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # unwinds, so that nothing half built stays
    try:
        request = CompileRequest.from_json(json.loads(arguments[0]))
        build(request, Path(arguments[1]), lambda stage: print(f"stage {stage}", flush=True))
    except (CompilerLLMError, IRError, KernelError) as error:
        message = str(error)
    except MemoryError:
        message = (
            "memory ran out while compiling. Free some, or compile on a machine with more and copy the cache."
        )
    except Exception as error:  # noqa: BLE001 - a bug; its traceback goes to whoever asks with --debug
        traceback.print_exc()
        said = (str(error).splitlines() or [""])[0]
        message = (
            f"{arguments[1]} cannot be compiled: {type(error).__name__}: {said}. This was not foreseen: if the "
            "checkpoint is sound, please report it with what --debug and `compilerllm collect-env` print."
        )
    else:
        return 0
    print("error " + json.dumps(message), flush=True)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
