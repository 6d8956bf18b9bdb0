"""Times a CPU step stage by stage: the artifact's program built once more, with a clock read after every stage.

The timed program has the same slots, offsets and kernels; rank 0 reads the clock (csrc/stamp.h) behind each stage's
barrier. Normal programs have nothing of it.
"""

import ctypes as C
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from compilerllm.artifact import ArtifactInvalid
from compilerllm.compiled import CompiledModel
from compilerllm.environment import cache_dir
from compilerllm.ir.graph import Module, Node
from compilerllm.ir.step import StepInputs
from compilerllm.ir.text import parse_module, print_node
from compilerllm.kernel_times import TimesDoNotMatch
from compilerllm.kernels.cpu.build import build_library
from compilerllm.kernels.cpu.emit import emit_program
from compilerllm.kernels.cpu.emitter import KernelUse, Program
from compilerllm.kernels.cpu.target import find_target
from compilerllm.kernels.launch.library import Library

WARM_UP = 3
REPEATS = 24
SECONDS = 20.0  # after which no run is begun that is not needed for a quarter of the repeats
Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class Stage:
    """A node as it is run in a step: in ``function``, for the layer whose names begin with ``prefix``.

    use: what runs it; None for the end of a layer function, where its results are handed over.
    """

    function: str
    node: Node
    prefix: str
    use: KernelUse | None


def stages_of(module: Module, program: Program) -> tuple[Stage, ...]:
    """Every stage of a step in the order it is run, layer functions once for each of their calls."""
    uses: dict[tuple[str, str], KernelUse] = {}
    for use in program.kernels:
        uses.setdefault((use.function, use.node), use)

    def walk(function: str, prefix: str) -> list[Stage]:
        found: list[Stage] = []
        for node in program.stages.get(function, []):
            if node.op == "call":
                found += walk(node.fn, node.text("params", ""))
            found.append(Stage(function, node, prefix, uses.get((function, print_node(node)))))
        return found

    return tuple(walk("main", ""))


@dataclass(frozen=True)
class TimedProgram:
    """A program built to be timed, and what its stamps stand for."""

    library: Path
    stages: tuple[Stage, ...]


def read_module(folder: Path) -> Module:
    """The module that an artifact's program was made from. Raises ``ArtifactInvalid``."""
    path = folder / "module.ir"
    try:
        text = path.read_text()
    except OSError as error:
        raise ArtifactInvalid(f"{path} cannot be read ({error}). Build the artifact again.") from error
    return parse_module(text, str(path))


def build_timed(folder: Path, manifest: dict[str, Any]) -> TimedProgram:
    """Build the timed program of an artifact, through the cache. Raises ``ArtifactInvalid``, ``BuildFailed``."""
    target = find_target(manifest["target"])
    module = read_module(folder)
    plain = emit_program(module, target)
    if plain.source != (folder / "program.cpp").read_text():
        raise ArtifactInvalid(
            f"{folder} was built by other code generators than this version's, so that its kernels cannot be timed. "
            "Build it again."
        )
    timed = emit_program(module, target, timed=True)
    library = build_library(timed.source, target, cache_dir() / "libraries")
    return TimedProgram(library, stages_of(module, timed))


@dataclass(frozen=True)
class StageTimes:
    """Microseconds: where each stage began after the step did, what it took, the step seen from outside, and ``waking``:
    until every thread of the team was there.

    Means over the middle half of ``repeats`` runs, by their wall time: so the parts add up to the whole.
    """

    starts: Array
    micros: Array
    wall: float
    waking: float
    repeats: int


class TimedModel:
    """A loaded and allocated model with the timed build of its program."""

    def __init__(self, model: CompiledModel, folder: Path) -> None:
        self.model = model
        self.timed = build_timed(folder, model.manifest)
        self._library = Library(self.timed.library)
        dll = self._library.dll
        dll.cllm_stamps.argtypes, dll.cllm_stamps.restype = [C.c_void_p, C.c_int64], None
        dll.cllm_stamped.argtypes, dll.cllm_stamped.restype = [], C.c_int64
        self._stamps = np.zeros(len(self.timed.stages) + 2, np.int64)
        dll.cllm_stamps(self._stamps.ctypes.data, len(self._stamps))

    def run(self, step: StepInputs) -> tuple[Array, int]:
        """One step: microseconds at which it began, the team was there and each stage ended, since the call; and nanoseconds
        of the call.

        Raises ``TimesDoNotMatch`` where there were more or fewer stages.
        """
        program = self.model.program
        plain, program.library = program.library, self._library
        try:
            before = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
            self.model.forward(step)
            after = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
        finally:
            program.library = plain
        if (seen := self._library.dll.cllm_stamped()) != len(self._stamps):
            raise TimesDoNotMatch(
                f"the timed program has {len(self._stamps) - 2} stages, but the step ran {seen - 2}"
            )
        return (self._stamps - before) / 1e3, after - before

    def time(self, step: StepInputs, repeats: int = REPEATS) -> StageTimes:
        """Run a step again and again. Raises ``TimesDoNotMatch``."""
        for _ in range(WARM_UP):
            self.run(step)
        runs: list[tuple[Array, int]] = []
        end = time.perf_counter() + SECONDS
        while len(runs) < repeats and (len(runs) < -(-repeats // 4) or time.perf_counter() < end):
            runs.append(self.run(step))
        return summarise(runs)


def summarise(runs: Sequence[tuple[Array, int]]) -> StageTimes:
    """Means over the middle half of runs, each the stamps in microseconds and the call's nanoseconds."""
    ordered = sorted(runs, key=lambda run: run[1])
    quarter = len(ordered) // 4
    middle = ordered[quarter : len(ordered) - quarter]
    stamps = np.mean([stamps for stamps, _ in middle], axis=0)
    wall = float(np.mean([nanoseconds for _, nanoseconds in middle])) / 1e3
    return StageTimes(stamps[1:-1], np.diff(stamps[1:]), wall, float(stamps[1] - stamps[0]), len(runs))


def write_contexts(model: CompiledModel, step: StepInputs) -> None:
    """Run what comes before a step, so that its context is in the caches and not in pages that nobody ever wrote."""
    most = max(b.max_query for b in model.buckets)
    ids = np.random.default_rng(1)
    for s in range(len(step.seq_lens)):
        query = int(step.query_start[s + 1] - step.query_start[s])
        end = int(step.seq_lens[s]) - query
        for start in range(0, end, most):
            count = min(most, end - start)
            model.forward(
                StepInputs(
                    token_ids=ids.integers(0, model.vocab_size, count, dtype=np.int32),
                    positions=np.arange(start, start + count, dtype=np.int32),
                    query_start=np.array([0, count], np.int32),
                    seq_lens=np.array([start + count], np.int32),
                    block_tables=np.ascontiguousarray(step.block_tables[:, s : s + 1]),
                    slots=step.slots[s : s + 1],
                    sample_rows=np.array([count - 1], np.int32),
                    adapter_id=np.zeros(count, np.int32),
                )
            )


__all__ = [
    "Stage", "StageTimes", "TimedModel", "TimedProgram", "build_timed", "read_module", "stages_of", "summarise",
    "write_contexts",
]  # fmt: skip
