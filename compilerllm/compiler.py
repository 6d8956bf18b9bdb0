"""The compile driver: checkpoint to artifact, in a child process of whoever needs it.

``ensure_artifact`` is what serving calls: it computes the key from small files, finds the artifact or has a child build
it (``building``), which imports the compiler; nothing here does.
"""

import dataclasses
import json
import logging
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from compilerllm import compile_watch
from compilerllm.artifact import ArtifactInvalid, artifact_path
from compilerllm.cache import discard, explain_miss, is_usable
from compilerllm.config import EngineConfig
from compilerllm.errors import CompilerLLMError
from compilerllm.ir.step import Bucket
from compilerllm.kernels.cpu.target import CpuTarget, UnknownTarget, find_target
from compilerllm.kernels.triton.target import TARGETS as CUDA_TARGETS
from compilerllm.kernels.triton.target import CudaTarget, find_cuda_target
from compilerllm.keys import Key, semantic_key
from compilerllm.targets import is_cuda, target_name

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
OnBuild = Callable[[int, str], None]  # number of the request, stage
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
    runner: Literal["auto", "generate", "pooling"] = "auto"
    candidates: int = (
        3  # kernels shipped where no tuning data knows a problem, for the machine that serves to choose from
    )
    rivals: int = (
        0  # kernels shipped where it does know one, for timing whole steps with each; 0: the fastest alone
    )

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
            config.model.load_format, config.model.skipped, config.model.runner,
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


def make_pooling_buckets(max_num_seqs: int, max_tokens: int) -> tuple[Bucket, ...]:
    """For steps of whole sequences: by tokens, any row of which may be wanted."""
    tokens = [t for t in (64, 256, 1024, 4096, 16384) if t < max_tokens] + [max_tokens]
    return tuple(Bucket(t, min(t, max_num_seqs), t, t) for t in tokens)


def artifact_key(request: CompileRequest, place: Path) -> Key:
    """The key of what is asked for: what the model says of itself, how it is compiled, the tools' versions.

    Raises ``UnknownTarget``, ``UnknownCudaTarget``, ``UnsupportedWeights``, and the weight files' errors.
    """
    target = find_build_target(request.target)
    if isinstance(target, CudaTarget) and request.weights == "packed":
        raise UnsupportedWeights(
            "--weights packed: CUDA kernels read dense weights only. Leave it out, or say --weights dense."
        )
    if request.load_format == "config" and place.is_file():
        raise UnsupportedWeights(
            f"{place} is a GGUF file, which holds the configuration and the weights; leave out --from-config."
        )
    key = semantic_key(request, target, place)
    if isinstance(target, CudaTarget) and key.fields["task"] != "generate" and request.level > 0:
        raise UnsupportedWeights(
            f"{request.model} gives embeddings or labels, and attention over whole sequences has no CUDA kernel yet. Serve it "
            "with --device cpu."
        )
    return key


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
    return ensure_artifacts([request], place, None if on_stage is None else lambda _, stage: on_stage(stage))[
        0
    ]


def ensure_artifacts(
    requests: Sequence[CompileRequest], place: Path, on_build: OnBuild | None = None, *,
    jobs: int | None = None, verify: bool = False,
) -> list[Found]:  # fmt: skip
    """As ``ensure_artifact``, several of one checkpoint by one child. jobs: processor cores it may use.

    verify: also run each rewrite beside what it replaced, for artifacts of the cache too.
    """
    start = time.perf_counter()
    reasons: dict[int, str] = {}
    found: list[Found | None] = []
    for number, request in enumerate(requests):
        key = artifact_key(request, place)
        path = artifact_path(key.digest)
        why = _why_missing(path, key)
        hit = Found(path, True, time.perf_counter() - start) if why is None else None
        found.append(hit)
        if hit is None or verify:
            reasons[number] = why or ""
    if reasons:
        numbers = sorted(reasons)
        wanted = [dataclasses.asdict(requests[n]) for n in numbers]
        order = json.dumps({"requests": wanted, "verify": verify, "jobs": jobs})
        for number in numbers:
            compile_watch.note(
                compile_watch.CHILD_BUILD, f"{requests[number].model} for {requests[number].target}"
            )
        built = run_child(
            # -P: what lies in the working directory is no module
            [sys.executable, "-P", "-m", "compilerllm.building", order, str(place)],
            None if on_build is None else lambda number, stage: on_build(numbers[number], stage),
        )
        for index, number in enumerate(numbers):
            made = built.get(index)
            if made is None or not is_usable(made):
                raise CompileFailed(
                    f"the compiler ended well but left no artifact of {requests[number].target}"
                )
            if found[number] is None:
                found[number] = Found(made, False, time.perf_counter() - start, reasons[number])
    return [f for f in found if f is not None]


def _why_missing(path: Path, key: Key) -> str | None:
    """None where the cache has the artifact; else the reason. A damaged one is taken out. Raises ``CacheUnusable``."""
    try:
        if is_usable(path):
            return None
        why = explain_miss(key.fields)
    except ArtifactInvalid as error:
        why = f"the one of the cache is damaged: {error}"
        _log.warning("%s", why)
        discard(path)
    _log.info("%s is built for %s: %s", key.digest, key.fields["target"], why)
    return why


def run_child(command: list[str], on_build: OnBuild | None = None) -> dict[int, Path]:
    """Run a process that reports as ``building`` does, to its end; gives what it built, by number.

    Raises ``CompileFailed`` with what it says.
    """
    message = ""
    built: dict[int, Path] = {}
    # A file, since nobody reads a pipe for errors before the child ends, and Inductor may write more than one holds.
    with tempfile.TemporaryFile("w+") as errors:
        child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
        assert child.stdout is not None
        try:
            for line in child.stdout:
                kind, _, text = line.rstrip("\n").partition(" ")
                if kind == "stage" and on_build is not None:
                    number, _, stage = text.partition(" ")
                    on_build(int(number), stage)
                elif kind == "built":
                    number, _, place = text.partition(" ")
                    built[int(number)] = Path(place)
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
    return built


def _end(child: "subprocess.Popen[str]") -> None:
    """End a build: at SIGTERM it removes what it has begun, which takes as long as a C++ compiler may be running."""
    child.terminate()
    try:
        child.wait(10)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
