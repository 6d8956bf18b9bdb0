"""The plainest sampler: the most likely token, by torch. For programs that bring no sampling of their own."""

from collections.abc import Callable, Mapping

import numpy as np
import torch

from compilerllm.ir.step import Int32, Sampled, SampleRows
from compilerllm.kernels.errors import KernelError
from compilerllm.kernels.launch.gpu.backend import Backend, Mark
from compilerllm.kernels.launch.gpu.steps import RING
from compilerllm.kernels.launch.sampling import empty_tables

GREEDY = "greedy"


class UnsupportedSampling(KernelError):
    """A way of sampling that the artifact has no kernels for."""


class GreedySampler:
    """argmax of each row."""

    variants = (GREEDY,)

    next_result = 0

    def __init__(self, backend: Backend, logits: torch.Tensor, slots: int, step: int = 0) -> None:
        """``logits`` [R, V] is where a step leaves them; ``slots`` sequences at most."""
        self._backend, self._logits, self._slots = backend, logits, slots
        self.tables = empty_tables(slots)
        rows = logits.shape[0]
        # One row more than there are slots: rows that belong to none write there.
        memory = backend.allocate(4 * (slots + 1), "last tokens")
        self._last_token = memory[: 4 * (slots + 1)].view(torch.int32)
        self._ids = backend.allocate(4 * rows, "sampled tokens")[: 4 * rows].view(torch.int32)
        backend.do(lambda: void(memory.zero_()))
        self._staging = [backend.staging(4 * rows) for _ in range(RING)]
        self._marks = [backend.mark() for _ in range(RING)]
        self._next = 0

    @property
    def addresses(self) -> Mapping[str, int]:
        return {"last_token": self._last_token.data_ptr()}

    def prepare(self, rows: SampleRows) -> str:
        """Raises ``UnsupportedSampling`` for all but greedy rows."""
        if rows.random or rows.penalties or rows.num_logprobs or len(rows.bias_token):
            raise UnsupportedSampling(
                "this artifact samples greedily only: no temperature, penalties, biases or log-probabilities. "
                "Build it again."
            )
        self.tables.changed.clear()
        return GREEDY

    def work(self, variant: str, bucket_rows: int, row_slots: int) -> Callable[[], None]:
        slots = self._backend.tensor(row_slots, torch.int32, (bucket_rows,))

        def sample() -> None:
            chosen = torch.argmax(self._logits[:bucket_rows], dim=1).to(torch.int32)
            self._ids[:bucket_rows].copy_(chosen)
            place = slots.to(torch.int64).remainder(self._slots + 1)  # -1 is the row behind the last slot
            self._last_token.index_copy_(0, place, chosen)

        return lambda: self._backend.do(sample)

    def run(self, rows: SampleRows, row_slots: int) -> None:
        self.work(GREEDY, len(rows.slots), row_slots)()

    def collect(self, rows: SampleRows) -> Callable[[], Sampled]:
        index, count = self._next, len(rows.slots)
        self._next = (index + 1) % RING
        staging, mark = self._staging[index], self._marks[index]
        self._backend.download(staging.data_ptr(), self._ids.data_ptr(), 4 * count)
        mark.record()
        slots = rows.slots

        def result() -> Sampled:
            ids = wait_for(mark, staging, count)
            self.tables.last_token[slots[slots >= 0]] = ids[slots >= 0]
            empty = np.empty(0, np.float32)
            nothing = np.empty((0, 0), np.int32)
            return Sampled(ids, empty, np.empty(0, np.int32), nothing, nothing.astype(np.float32))

        return result


def wait_for(mark: Mark, staging: torch.Tensor, count: int) -> Int32:
    """``count`` int32 of a staging buffer, copied, once the point in the stream has passed."""
    mark.wait()
    result: Int32 = staging.numpy()[: 4 * count].view(np.int32).copy()
    return result


def void(result: object) -> None:
    """Forget a result: for lambdas that are run for what they do."""
