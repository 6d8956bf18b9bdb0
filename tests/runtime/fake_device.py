"""The fake model on a device of its own: steps are queued, and run only when somebody waits for them.

The device has its own tables. It is sent what a step needs when the step is enqueued, and reads nothing of the host's
later, so a row that the host fills without saying so, or fills too early, is seen in the output.
"""

import dataclasses
from collections import deque
from typing import Any, Literal

import numpy as np

from compilerllm.ir.step import Sampled, SampleRows, SamplingTables, StepInputs
from tests.runtime.fake_model import FakeModel

_ROWS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
         "seed", "draws", "prompt_counts", "output_counts")  # fmt: skip


class QueuedStep:
    """The ``Pending`` of the fake device."""

    def __init__(self, model: "FakeDevice", step: StepInputs, rows: SampleRows | None) -> None:
        self.model = model
        self.step = dataclasses.replace(
            step,
            **{
                f.name: field.copy()
                for f in dataclasses.fields(step)
                if (field := getattr(step, f.name)) is not None
            },
        )
        self.rows = rows
        self.slots: Any = None  # of rows to come
        self.uploads = model.take_changes()

    def run(self) -> Sampled | None:
        self.model.upload(self.uploads)
        self.model.forward(self.step)
        return None if self.rows is None else self.model.sample(self.rows)

    def result(self) -> Sampled | None:
        assert self.model.queue and self.model.queue[0] is self, "results are asked for once, in order"
        self.model.queue.popleft()
        return self.run()


class FakeDevice(FakeModel):
    """An ``AsyncExecutable``."""

    asynchronous: Literal[True] = True

    def count_blocks(
        self,
        utilization: float,
        max_num_seqs: int,
        max_model_len: int,
        *,
        kv_cache_bytes: int | None = None,
        num_blocks: int | None = None,
        memory_bytes: int | None = None,
    ) -> int:
        return num_blocks or max_num_seqs * max_model_len // self.groups[0].block_size

    def allocate(self, num_blocks: int, max_num_seqs: int) -> SamplingTables:
        super().allocate(num_blocks, max_num_seqs)  # self.tables are the device's
        self.queue: deque[QueuedStep] = deque()
        self.deepest = 0  # most steps ever on their way at once
        self._last_tables: tuple[Any, Any] | None = None
        self.resent = 0  # steps that came with the block tables of the step before
        self.host = SamplingTables(
            **{
                f.name: getattr(self.tables, f.name).copy()
                for f in dataclasses.fields(SamplingTables)
                if getattr(self.tables, f.name) is not None
            },
            prompt_counts=None,
            output_counts=None,
        )
        return self.host

    def take_changes(self) -> dict[str, dict[int, Any]]:
        """The host's changed rows, by table and slot."""
        slots, self.host.changed = sorted(self.host.changed), set()
        tables = {name: getattr(self.host, name) for name in _ROWS}
        return {
            name: {slot: np.copy(table[slot]) for slot in slots}
            for name, table in tables.items()
            if table is not None
        }

    def upload(self, changes: dict[str, dict[int, Any]]) -> None:
        for name, rows in changes.items():
            if getattr(self.tables, name) is None:
                setattr(self.tables, name, np.zeros_like(getattr(self.host, name)))
            for slot, row in rows.items():
                getattr(self.tables, name)[slot] = row

    def enqueue_forward(self, step: StepInputs, slots: Any) -> None:
        self.enqueue(step, None).slots = slots.copy()

    def enqueue_sample(self, rows: SampleRows) -> QueuedStep:
        queued = self.queue[-1]
        assert queued.rows is None and np.array_equal(queued.slots, rows.slots)
        queued.rows = rows
        for name, changes in self.take_changes().items():
            queued.uploads.setdefault(name, {}).update(changes)
        return queued

    def enqueue(self, step: StepInputs, rows: SampleRows | None) -> QueuedStep:
        if self._last_tables is not None and self._last_tables[0] is step.block_tables:
            self.resent += 1
            assert np.array_equal(*self._last_tables), "block tables were written after they were handed over"
        self._last_tables = step.block_tables, step.block_tables.copy()
        self.queue.append(QueuedStep(self, step, rows))
        self.deepest = max(self.deepest, len(self.queue))
        assert self.deepest <= 2, "more than two steps are on their way"
        return self.queue[-1]
