"""Step inputs on their way to the device: filled into pinned memory, padded to the bucket, copied in one piece.

A ring of staging buffers lets the host fill the next step while earlier copies are still waiting in the stream.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from compilerllm.ir.step import Bucket, Int32, StepInputs
from compilerllm.kernels.errors import KernelError
from compilerllm.kernels.launch.gpu.backend import Backend
from compilerllm.kernels.launch.gpu.program import META_BYTES, RESULT_WORD, StepLayout

RING = 4  # staging buffers: two steps under way, one being filled, one spare


class StepRefused(KernelError):
    """A step that does not fit the program's layout."""


class StepStage:
    """The device buffer that all buckets share, and its ring of pinned buffers."""

    def __init__(
        self, backend: Backend, buckets: Sequence[Bucket], groups: int, table_columns: int, ring: int = RING
    ) -> None:
        """``table_columns``: most blocks of one sequence."""
        self._backend, self._groups, self._columns = backend, groups, table_columns
        self.layouts = tuple(StepLayout.of(b, groups, table_columns) for b in buckets)
        self.nbytes = step_bytes(buckets, groups, table_columns)
        self.memory = backend.allocate(self.nbytes, "step inputs")
        self.address = self.memory.data_ptr()
        self._words = [{name: at // 4 for name, at in layout.offsets.items()} for layout in self.layouts]
        self._ring = [backend.staging(self.nbytes) for _ in range(ring)]
        self._arrays: list[Int32] = [buffer.numpy().view(np.int32) for buffer in self._ring]
        self._marks = [backend.mark() for _ in range(ring)]
        self._used = [False] * ring
        self._next = 0
        self._tables: Int32 | None = None  # what lies in the device buffer's tables, laid out for ``_bucket``
        self._bucket = -1

    def send(
        self,
        bucket: int,
        step: StepInputs,
        row_slots: Int32 | None,
        sizes: tuple[int, int, int],
        result: int = 0,
    ) -> None:
        """Fill and copy one step. ``sizes`` are the T, S and R that the program will run at; rows beyond the step's own are
        padded: ids and positions 0, slots -1, lengths 0, query_start its last value. ``result``: where in the sampler's
        ring of results the step's tokens go.

        Raises ``StepRefused`` for block tables that are too wide. Reads everything before it returns.
        """
        groups, sequences, stride = step.block_tables.shape
        if stride > self._columns or groups != self._groups:
            raise StepRefused(
                f"a step has {groups} block tables of {stride} blocks; the program has {self._groups} of at most "
                f"{self._columns}"
            )
        index = self._take()
        words, at = self._arrays[index], self._words[bucket]
        t, s, r = len(step.token_ids), sequences, len(step.sample_rows)
        tokens, seqs, rows = sizes
        words[0:4] = t, s, r, stride
        words[RESULT_WORD] = result
        _put(words, at["token_ids"], step.token_ids, tokens, 0)
        _put(words, at["positions"], step.positions, tokens, 0)
        _put(words, at["query_start"], step.query_start, seqs + 1, t)
        _put(words, at["seq_lens"], step.seq_lens, seqs, 0)
        _put(words, at["slots"], step.slots, seqs, -1)
        _put(words, at["sample_rows"], step.sample_rows, rows, 0)
        _put(words, at["adapter_id"], step.adapter_id, tokens, 0)
        start = at["row_slots"]
        if row_slots is None:
            words[start : start + rows] = -1
        else:
            _put(words, start, last_rows(row_slots) if step.max_query > 1 else row_slots, rows, -1)
        self._copy(index, bucket, step.block_tables)
        self._marks[index].record()
        self._used[index] = True

    def send_row_slots(self, bucket: int, slots: Int32, rows: int) -> None:
        """Say of the step last sent which slots its rows belong to; rows beyond them get -1."""
        index, at = self._take(), self._words[bucket]["row_slots"]
        _put(self._arrays[index], at, last_rows(slots), rows, -1)
        self._backend.upload(self.address + 4 * at, self._ring[index].data_ptr() + 4 * at, 4 * rows)
        self._marks[index].record()
        self._used[index] = True

    def _take(self) -> int:
        """The next staging buffer, once the copies from it are done."""
        index = self._next
        self._next = (index + 1) % len(self._ring)
        if self._used[index]:
            self._marks[index].wait()
        return index

    def _copy(self, index: int, bucket: int, tables: Int32) -> None:
        """Head and block tables; the tables stay where they are the same as the last step's."""
        offsets, words = self.layouts[bucket].offsets, self._arrays[index]
        source, nbytes = self._ring[index].data_ptr(), tables[0].nbytes if self._groups else 0
        head = offsets["table_0"] if self._groups else self.layouts[bucket].bytes
        if tables is self._tables and bucket == self._bucket:
            self._backend.upload(self.address, source, head)
            return
        for group in range(self._groups):
            begin = offsets[f"table_{group}"]
            words[begin // 4 : (begin + nbytes) // 4] = tables[group].reshape(-1)
            if group == 0:
                self._backend.upload(self.address, source, begin + nbytes)
            else:
                self._backend.upload(self.address + begin, source + begin, nbytes)
        if not self._groups:
            self._backend.upload(self.address, source, head)
        self._tables, self._bucket = tables, bucket

    def send_empty(self, bucket: int, sizes: tuple[int, int, int]) -> None:
        """A step of nothing but padding, for first runs."""
        none = np.empty(0, np.int32)
        tables = np.empty((self._groups, 0, 1), np.int32)
        start = np.zeros(1, np.int32)
        self.send(bucket, StepInputs(none, none, start, none, tables, none, none, none), none, sizes)

    def offsets(self, bucket: int) -> Mapping[str, int]:
        """Bytes from ``address`` to each field."""
        return self.layouts[bucket].offsets


def step_bytes(buckets: Sequence[Bucket], groups: int, table_columns: int) -> int:
    """Bytes of the largest bucket's step inputs."""
    return max((StepLayout.of(b, groups, table_columns).bytes for b in buckets), default=META_BYTES)


def last_rows(slots: Int32) -> Int32:
    """The rows' slots, but -1 where a later row has the same: programs run in any order, and one alone may write a slot."""
    _, from_end = np.unique(slots[::-1], return_index=True)
    last = len(slots) - 1 - from_end
    result = np.full_like(slots, -1)
    result[last] = slots[last]
    return result


def _put(words: Int32, at: int, values: Int32, size: int, padding: int) -> None:
    """``values``, then ``padding`` up to ``size`` words."""
    end = at + len(values)
    words[at:end] = values
    if end < at + size:
        words[end : at + size] = padding
