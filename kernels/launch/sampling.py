"""The sampling program's launcher: tables by slot in numpy arrays that the library reads and advances in place."""

import ctypes as C
from typing import Any

import numpy as np

from compilerllm.ir.step import Float32, Sampled, SampleRows, SamplingTables
from compilerllm.kernels.launch.library import Library

_TABLES = (
    "temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "top_k", "seed",
    "draws", "last_token", "prompt_counts", "output_counts",
)  # fmt: skip


class _Tables(C.Structure):
    """``csrc/sampler.cpp``'s SampleTables."""

    _fields_ = [(name, C.c_void_p) for name in _TABLES]


class _Job(C.Structure):
    """``csrc/sampler.cpp``'s SampleJob."""

    _fields_ = [
        ("logits", C.c_void_p), ("ld", C.c_int64), ("rows", C.c_int), ("vocab", C.c_int), ("slots", C.c_void_p),
        ("bias_start", C.c_void_p), ("bias_token", C.c_void_p), ("bias_value", C.c_void_p), ("mask", C.c_void_p),
        ("target", C.c_void_p), ("logprobs", C.c_int),
        ("penalties", C.c_int), ("token", C.c_void_p), ("logprob", C.c_void_p), ("rank", C.c_void_p),
        ("top_ids", C.c_void_p), ("top_logprobs", C.c_void_p),
    ]  # fmt: skip


def empty_tables(slots: int) -> SamplingTables:
    """Tables for ``slots`` sequences: greedy, nothing penalised, no counts."""
    return SamplingTables(
        temperature=np.zeros(slots, np.float32), top_k=np.zeros(slots, np.int32), top_p=np.ones(slots, np.float32),
        min_p=np.zeros(slots, np.float32), repetition_penalty=np.ones(slots, np.float32),
        presence_penalty=np.zeros(slots, np.float32), frequency_penalty=np.zeros(slots, np.float32),
        seed=np.zeros(slots, np.uint64), draws=np.zeros(slots, np.int64), last_token=np.zeros(slots, np.int32),
        prompt_counts=None, output_counts=None,
    )  # fmt: skip


class Sampler:
    """Chooses tokens from logits [R, V] float32."""

    def __init__(self, library: Library, vocab_size: int, slots: int, threads: int) -> None:
        self._run = library.dll.cllm_sample
        self._run.argtypes, self._run.restype = [C.c_int, C.POINTER(_Job), C.POINTER(_Tables)], None
        self.vocab_size, self.threads = vocab_size, threads
        self.tables = empty_tables(slots)
        self._pointers: tuple[object, _Tables] | None = None  # made anew when the count tables appear

    def _table_pointers(self) -> _Tables:
        counts = self.tables.output_counts
        if self._pointers is None or self._pointers[0] is not counts:
            self._pointers = counts, _Tables(*(_address(getattr(self.tables, name)) for name in _TABLES))
        return self._pointers[1]

    def sample(self, logits: Float32, rows: SampleRows) -> Sampled:
        """One token a row. Rows of one slot draw successive random numbers, and see each other's counts."""
        count = len(rows.slots)
        if count > 1 and len(set(rows.slots.tolist())) < count:
            return _join([self._sample(logits[r : r + 1], _row(rows, r)) for r in range(count)])
        return self._sample(logits, rows)

    def _sample(self, logits: Float32, rows: SampleRows) -> Sampled:
        count, top = len(rows.slots), rows.num_logprobs
        scored = count if top else 0
        result = Sampled(
            np.empty(count, np.int32), np.empty(scored, np.float32), np.empty(scored, np.int32),
            np.empty((scored, top), np.int32), np.empty((scored, top), np.float32),
        )  # fmt: skip
        if count == 0:
            return result
        tables = self._table_pointers()
        job = _Job(
            logits.ctypes.data, logits.strides[0] // 4, count, self.vocab_size, rows.slots.ctypes.data,
            rows.bias_start.ctypes.data, rows.bias_token.ctypes.data, rows.bias_value.ctypes.data, _address(rows.mask),
            _address(rows.target), top if top else -1,
            int(rows.penalties), result.token_ids.ctypes.data, result.logprob.ctypes.data, result.rank.ctypes.data,
            result.top_ids.ctypes.data, result.top_logprobs.ctypes.data,
        )  # fmt: skip
        self._run(self.threads, C.byref(job), C.byref(tables))
        return result


def _address(array: Any) -> int | None:
    return None if array is None else array.ctypes.data


def _row(rows: SampleRows, r: int) -> SampleRows:
    begin, end = int(rows.bias_start[r]), int(rows.bias_start[r + 1])
    return SampleRows(
        rows.slots[r : r + 1], np.array([0, end - begin], np.int32), rows.bias_token[begin:end],
        rows.bias_value[begin:end], rows.num_logprobs, rows.penalties, rows.random,
        None if rows.mask is None else rows.mask[r : r + 1], None if rows.target is None else rows.target[r : r + 1],
    )  # fmt: skip


def _join(parts: list[Sampled]) -> Sampled:
    return Sampled(
        *(np.concatenate([getattr(p, name) for p in parts]) for name in Sampled.__dataclass_fields__)
    )
