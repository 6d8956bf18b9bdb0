"""CUDA graphs of steps: which are captured, in which order, and how much memory they take, said before and checked after."""

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from compilerllm.ir.step import Bucket
from compilerllm.kernels.launch.gpu.backend import Backend

log = logging.getLogger(__name__)
OnCapture = Callable[[int, int], None]  # graphs done, graphs in all
# Measured on an H200 as free device memory before and after graphs are instantiated and uploaded, by kernel nodes.
GRAPH_BYTES = 207_000  # of a graph, beside its nodes
NODE_BYTES = 2_455  # of a kernel node: parameters and launch descriptors


@dataclass(frozen=True)
class Recipe:
    """A graph to capture: its bucket, the sampling variant joined to it ("" for none), what to run, and its nodes."""

    bucket: int
    variant: str
    tokens: int
    nodes: int
    work: Callable[[], None]


class GraphSet:
    """Captured steps by bucket and variant."""

    def __init__(self) -> None:
        self._replays: dict[tuple[int, str], Callable[[], None]] = {}
        self.predicted = 0
        self.measured = 0
        self.seconds = 0.0

    def find(self, bucket: int, variant: str) -> Callable[[], None] | None:
        """What replays the step, or None where it has no graph."""
        return self._replays.get((bucket, variant))

    def __len__(self) -> int:
        return len(self._replays)

    def capture(
        self, backend: Backend, recipes: Sequence[Recipe], on_progress: OnCapture | None = None
    ) -> None:
        """Capture all, largest first, so that smaller ones find memory that the larger ones left in the pool."""
        order = sorted(recipes, key=lambda r: -r.tokens)
        self.predicted += graph_bytes(r.nodes for r in order)
        start, before = time.perf_counter(), backend.memory()[0]
        for done, recipe in enumerate(order):
            if on_progress is not None:
                on_progress(done, len(order))
            self._replays[recipe.bucket, recipe.variant] = backend.capture(recipe.work)
        if on_progress is not None:
            on_progress(len(order), len(order))
        self.measured += before - backend.memory()[0]
        self.seconds += time.perf_counter() - start
        log.info(
            "%d CUDA graphs in %.2f s: %.1f MiB, %.1f predicted.", len(order), self.seconds,
            self.measured / 2**20, self.predicted / 2**20,
        )  # fmt: skip


def captured_buckets(buckets: Sequence[Bucket], max_tokens: int) -> list[int]:
    """Buckets that get graphs: every decode bucket, and mixed ones of up to ``max_tokens`` tokens."""
    return [i for i, b in enumerate(buckets) if b.max_query == 1 or b.tokens <= max_tokens]


def graph_bytes(nodes: Iterable[int]) -> int:
    """Predicted memory of instantiated graphs with these counts of nodes."""
    return sum(GRAPH_BYTES + NODE_BYTES * count for count in nodes)
