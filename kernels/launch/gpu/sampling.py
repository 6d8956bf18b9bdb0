"""Sampling on the device at serve time: a ``StepSampler`` over the sampling program of an artifact.

How an executable uses it, step by step:

1. once: ``GpuSampler(backend, program, backend.load(program, folder), logits, slots)``; ``program`` is the artifact's
   sampling program, ``logits`` f32 [R, V] where every step's forward leaves them. ``addresses`` has "last_token" for the
   forward; ``variants`` are those that a graph may join to a forward: for each decode bucket and variant, call
   ``work(variant, rows, row_slots)`` once, then capture it behind the forward.
2. each step: ``variant = prepare(rows)``. It reads ``tables`` and ``rows``, and puts the step's parameters on their way
   to fixed addresses; it must be called before the step's graph or ``run`` is enqueued, and exactly once for each step
   that samples, because it counts the slots' random draws on the host. "" means that the step joins no graph (penalties,
   biases or log-probabilities): replay the forward alone, then ``run(rows, row_slots)``.
3. ``collect(rows)`` enqueues the copy of the results; what it returns waits for them.

Three variants. "greedy": no row has a temperature; reads the slots at ``row_slots`` and nothing else from the host.
"sampled": reads ``RowLayout`` words of each row, 64 bytes a row and step. "full": ``FULL_ROWS`` rows at a time. Rows of
one slot in a step (speculation) draw successive numbers; where counts matter they are launched one after another, so that
each sees the former's token counted.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from compilerllm.ir.step import Int32, Sampled, SampleRows
from compilerllm.kernels.errors import KernelError
from compilerllm.kernels.launch.gpu.backend import ALIGNMENT, Backend, BoundPlan, LoadedProgram, Mark
from compilerllm.kernels.launch.gpu.program import RESULT_WORD, Addresses, Plan, Program
from compilerllm.kernels.launch.gpu.steps import RING, last_rows
from compilerllm.kernels.launch.sampling import empty_tables

GREEDY, SAMPLED, FULL = "greedy", "sampled", "full"
FULL_ROWS = 32  # rows of a launch that works on a copy of the logits
TOP = 32  # places for a row's most likely tokens
META_WORDS = 16  # int32: rows of the step, log-probabilities wanted a row, whether rows have masks, unused
BIAS_ENTRIES = 1024  # of a step, for which there is memory from the start
MOST_BIAS_BYTES = 8 << 20  # what steps with more may add to that
# What the memory plan calls what is allocated here at the start, and with the first request that needs it.
TABLES, BIASES = "sampling tables", "penalties and biases"


class TooManyLogprobs(KernelError):
    """More log-probabilities a token than the kernels have places for."""


@dataclass(frozen=True)
class RowLayout:
    """Words (int32, or float32 bits) of one row's parameters, as the templates read them."""

    slot: int = 0
    temperature: int = 1
    top_k: int = 2
    top_p: int = 3
    log_min_p: int = 4  # natural, -inf for none
    repetition: int = 5
    presence: int = 6
    frequency: int = 7
    seed: int = 8  # two words, low first
    draws: int = 10  # two words, low first
    bias_begin: int = 12
    bias_end: int = 13
    penalised: int = 14
    target: int = 15  # a token to report on in place of choosing one, or -1
    words: int = 16


ROW = RowLayout()
# Of each row: token, then what log-probabilities need.
RESULT_BYTES = {"sampled": 4, "logprob": 4, "rank": 4, "top_ids": 4 * TOP, "top_logprobs": 4 * TOP}


def table_allocations(arena: int, counters: int, rows: int, slots: int) -> list[int]:
    """Bytes of each of ``GpuSampler``'s allocations at the start, in order. arena, counters: of its program."""
    return [
        arena, 4 * max(1, counters), 4 * (META_WORDS + ROW.words * rows), 4 * slots,
        *(size * rows for size in RESULT_BYTES.values()), 4 * BIAS_ENTRIES, 4 * BIAS_ENTRIES,
    ]  # fmt: skip


def late_bytes(slots: int, rows: int, vocab: int) -> int:
    """Most bytes that requests with penalties, biases and masks may add: counts of tokens by slot, longer lists of biases,
    a bit for each token of each of a step's ``rows``."""
    size = slots * vocab
    tables = (size, 2 * size, mask_bytes(rows, vocab))
    return sum(-(-n // ALIGNMENT) * ALIGNMENT for n in tables) + MOST_BIAS_BYTES


def mask_bytes(rows: int, vocab: int) -> int:
    """Bytes of the masks of ``rows``."""
    return 4 * rows * -(-vocab // 32)


class _Upload:
    """A ring of staging buffers for one kind of upload; each is filled again only after its copy."""

    def __init__(self, backend: Backend, nbytes: int, ring: int = RING) -> None:
        self._backend, self.nbytes = backend, nbytes
        self._buffers = [backend.staging(nbytes) for _ in range(ring)]
        self._marks = [backend.mark() for _ in range(ring)]
        self._used = [False] * ring
        self._next = 0

    def take(self) -> npt.NDArray[np.uint8]:
        """The next buffer, to be filled and sent."""
        if self._used[self._next]:
            self._marks[self._next].wait()
        result: npt.NDArray[np.uint8] = self._buffers[self._next].numpy()
        return result

    def send(self, copies: Sequence[tuple[int, int, int]]) -> None:
        """Copy parts of the buffer: (device address, offset in the buffer, bytes)."""
        base = self._buffers[self._next].data_ptr()
        for target, offset, nbytes in copies:
            if nbytes:
                self._backend.upload(target, base + offset, nbytes)
        self._marks[self._next].record()
        self._used[self._next] = True
        self._next = (self._next + 1) % len(self._buffers)


class GpuSampler:
    """Chooses tokens from logits on the device. The module says how it is used."""

    variants = (GREEDY, SAMPLED)

    def __init__(
        self,
        backend: Backend,
        program: Program,
        loaded: LoadedProgram,
        logits: torch.Tensor,
        slots: int,
        step: int,
    ) -> None:
        """``logits`` f32 [R, V] on the device, R the most rows of a step; ``slots`` sequences at most; ``step``: address of
        the step's inputs, whose head says where tokens go in the ring of results."""
        self._backend, self._loaded, self._logits, self._slots = backend, loaded, logits, slots
        self.tables = empty_tables(slots)
        rows, self.vocab_size = logits.shape
        self._plans = {
            v: sorted((p for p in program.plans if p.variant == v), key=lambda p: p.bucket.rows)
            for v in (GREEDY, SAMPLED, FULL)
        }
        self._bound: dict[tuple[str, int, int], BoundPlan] = {}
        arena = max(p.arena_bytes for p in program.plans)
        self._arena = backend.allocate(arena, TABLES)
        self._counters = backend.allocate(4 * max(1, program.counters), TABLES)
        self._inputs = backend.allocate(4 * (META_WORDS + ROW.words * rows), TABLES)
        self._last_token = backend.allocate(4 * slots, TABLES)
        self._sizes = RESULT_BYTES
        self._results = {n: backend.allocate(size * rows, TABLES) for n, size in self._sizes.items()}
        for memory in (self._counters, self._inputs, self._last_token, self._results["sampled"]):
            backend.do(partial(_clear, memory))
        self._host: Int32 = np.zeros((slots + 1, ROW.words), np.int32)  # the last: rows without a slot
        self._host[slots, ROW.slot] = -1
        self._draws: npt.NDArray[np.int64] = np.zeros(slots + 1, np.int64)
        self._fill(np.arange(slots))
        self._upload = _Upload(backend, self._inputs.numel())
        self._ring_word = step + 4 * RESULT_WORD
        # Tokens are written by the kernels themselves, so that no copy stands between two steps.
        self._ring_bytes = 4 * max(
            p.bucket.rows for p in program.plans
        )  # of one step, as the kernels lay it out
        self._ring = backend.staging(RING * self._ring_bytes)
        self._staging = [backend.staging(sum(self._sizes.values()) * rows) for _ in range(RING)]
        self._marks = [backend.mark() for _ in range(RING)]
        self._next = 0
        self._reserve_biases(BIAS_ENTRIES, TABLES)
        self._counts: tuple[torch.Tensor, torch.Tensor] | None = (
            None  # prompt seen u8, output i16: [slots, V]
        )
        self._count_upload: _Upload | None = None
        self._masks: torch.Tensor | None = None  # int32 [R, ceil(V / 32)]
        self._mask_upload: _Upload | None = None

    @property
    def addresses(self) -> Mapping[str, int]:
        """Device tables by name that the forward's programs read."""
        return {"last_token": self._last_token.data_ptr()}

    @property
    def next_result(self) -> int:
        """Place in the ring of results of the step that is enqueued next."""
        return self._next

    # -- before a step ----------------------------------------------------------------------------------------------

    def prepare(self, rows: SampleRows) -> str:
        """Send what the rows need; the variant to run, "" for one that joins no graph. Once for each sampled step.

        Raises ``TooManyLogprobs``, and ``DeviceOutOfMemory`` where the first request with penalties finds no room for
        its tables.
        """
        if rows.num_logprobs > TOP:
            raise TooManyLogprobs(
                f"{rows.num_logprobs} log-probabilities a token; sampling on CUDA has {TOP}"
            )
        self._take_changes()
        variant = variant_of(rows)
        slots = np.where(rows.slots < 0, self._slots, rows.slots)
        # Rows of one slot draw one number after another.
        ahead = _occurrences(slots)
        draws = self._draws[slots] + ahead
        np.add.at(self._draws, slots, 1)
        if variant == GREEDY:
            return GREEDY
        buffer = self._upload.take()
        words = buffer[: 4 * (META_WORDS + ROW.words * len(slots))].view(np.int32)
        words[:2] = len(slots), rows.num_logprobs
        table = words[META_WORDS:].reshape(-1, ROW.words)
        table[:] = self._host[slots]
        table[:, ROW.draws : ROW.draws + 2] = np.ascontiguousarray(draws).view(np.int32).reshape(-1, 2)
        if (
            ahead.any() and not rows.penalties
        ):  # with penalties, rows of one slot are launched one after another
            table[:, ROW.slot] = last_rows(rows.slots)
        if variant == FULL:
            table[:, ROW.bias_begin], table[:, ROW.bias_end] = rows.bias_start[:-1], rows.bias_start[1:]
            if not rows.penalties or self._counts is None:
                table[:, ROW.penalised] = 0
            self._send_biases(rows)
            table[:, ROW.target] = -1 if rows.target is None else rows.target
            words[2] = rows.mask is not None
            if rows.mask is not None:
                self._send_masks(rows.mask)
        self._upload.send([(self._inputs.data_ptr(), 0, words.nbytes)])
        return "" if variant == FULL else variant

    def _take_changes(self) -> None:
        changed = np.array(sorted(self.tables.changed), np.int64)
        self.tables.changed.clear()
        if len(changed):
            self._fill(changed)
        if self.tables.output_counts is not None:
            if self._counts is None:
                self._make_counts()
            for slot in changed.tolist():
                if self._host[slot, ROW.penalised]:
                    self._send_counts(slot)

    def _fill(self, slots: npt.NDArray[np.int64]) -> None:
        """Words of the slots' rows from the tables."""
        t, table = self.tables, self._host[slots]
        with np.errstate(divide="ignore"):
            log_min_p = np.log(t.min_p[slots].astype(np.float32))
        floats = (
            (ROW.temperature, t.temperature[slots]), (ROW.top_p, t.top_p[slots]), (ROW.log_min_p, log_min_p),
            (ROW.repetition, t.repetition_penalty[slots]), (ROW.presence, t.presence_penalty[slots]),
            (ROW.frequency, t.frequency_penalty[slots]),
        )  # fmt: skip
        for column, values in floats:
            table[:, column] = np.ascontiguousarray(values, np.float32).view(np.int32)
        table[:, ROW.slot], table[:, ROW.top_k] = slots, t.top_k[slots]
        table[:, ROW.seed : ROW.seed + 2] = t.seed[slots].astype(np.uint64).view(np.int32).reshape(-1, 2)
        table[:, ROW.penalised] = (
            (t.repetition_penalty[slots] != 1)
            | (t.presence_penalty[slots] != 0)
            | (t.frequency_penalty[slots] != 0)
        )
        self._host[slots] = table
        self._draws[slots] = t.draws[slots]

    def _make_counts(self) -> None:
        size = self._slots * self.vocab_size
        self._counts = (
            self._backend.allocate(size, BIASES),  # tokens in prompts
            self._backend.allocate(2 * size, BIASES),  # in outputs
        )
        self._count_upload = _Upload(self._backend, 3 * self.vocab_size + 1, 2)
        self._forget_full()

    def _send_counts(self, slot: int) -> None:
        assert self._counts is not None and self._count_upload is not None
        v, upload = self.vocab_size, self._count_upload
        buffer = upload.take()
        buffer[: 2 * v].view(np.uint16)[:] = self.tables.output_counts[slot]
        buffer[2 * v : 3 * v] = self.tables.prompt_counts[slot] > 0
        seen, output = (memory.data_ptr() for memory in self._counts)
        upload.send([(output + 2 * v * slot, 0, 2 * v), (seen + v * slot, 2 * v, v)])

    def _reserve_biases(self, entries: int, what: str = BIASES) -> None:
        self._biases = [self._backend.allocate(4 * entries, what) for _ in range(2)]
        self._bias_room = entries
        self._bias_upload = _Upload(self._backend, 8 * entries)
        self._forget_full()

    def _send_biases(self, rows: SampleRows) -> None:
        count = len(rows.bias_token)
        if count > self._bias_room:
            self._backend.synchronize()  # rare: copies from the smaller buffers are still to run
            self._reserve_biases(2 * count)
        buffer = self._bias_upload.take()
        buffer[: 4 * count].view(np.int32)[:] = rows.bias_token
        buffer[4 * count : 8 * count].view(np.float32)[:] = rows.bias_value
        token, value = (memory.data_ptr() for memory in self._biases)
        self._bias_upload.send([(token, 0, 4 * count), (value, 4 * count, 4 * count)])

    def _reserve_masks(self) -> None:
        nbytes = mask_bytes(self._logits.shape[0], self.vocab_size)
        self._masks = self._backend.allocate(nbytes, BIASES)
        self._mask_upload = _Upload(self._backend, nbytes)
        self._forget_full()

    def _send_masks(self, mask: npt.NDArray[np.uint32]) -> None:
        if self._mask_upload is None:
            self._reserve_masks()
        assert self._mask_upload is not None and self._masks is not None
        buffer = self._mask_upload.take()
        buffer[: mask.nbytes].view(np.uint32).reshape(mask.shape)[:] = mask
        self._mask_upload.send([(self._masks.data_ptr(), 0, mask.nbytes)])

    def _forget_full(self) -> None:
        """Bound launches that hold addresses of tables which have moved."""
        self._bound = {key: plan for key, plan in self._bound.items() if key[0] != FULL}

    # -- the step ---------------------------------------------------------------------------------------------------

    def work(self, variant: str, bucket_rows: int, row_slots: int) -> Callable[[], None]:
        """What a graph captures: sampling of a bucket's rows; greedy's slots lie at the address ``row_slots``."""
        return self._loaded.bind(self._plan(variant, bucket_rows), self._where(0, row_slots)).run

    def run(self, rows: SampleRows, row_slots: int) -> None:
        """The same without a graph, for exactly these rows."""
        count, variant = len(rows.slots), variant_of(rows)
        if not count:
            return
        if variant != FULL:
            plan = self._plan(variant, count)
            self._run(variant, plan, 0, row_slots, count)
            return
        for start, end in _chunks(rows, self._plans[FULL][0].bucket.rows):
            self._run(FULL, self._plans[FULL][0], start, row_slots, end - start)

    def _run(self, variant: str, plan: Plan, start: int, row_slots: int, count: int) -> None:
        key = variant, plan.bucket.rows, row_slots if variant == GREEDY else start
        if key not in self._bound:
            self._bound[key] = self._loaded.bind(plan, self._where(start, row_slots))
        bound = self._bound[key]
        bound.size({"T": count, "S": count, "R": count})
        bound.run()

    def _plan(self, variant: str, rows: int) -> Plan:
        return next(p for p in self._plans[variant] if p.bucket.rows >= rows)

    def _where(self, start: int, row_slots: int) -> Addresses:
        """Addresses for rows from ``start`` on."""
        inputs = self._inputs.data_ptr()
        tables = {n: self._results[n].data_ptr() + size * start for n, size in self._sizes.items()}
        seen, output = (inputs, inputs) if self._counts is None else (m.data_ptr() for m in self._counts)
        masks = inputs if self._masks is None else self._masks.data_ptr() + mask_bytes(start, self.vocab_size)
        tables |= {
            "results": self._ring.data_ptr() + 4 * start, "ring": self._ring_word, "row_meta": inputs, "rows": inputs + 4 * (META_WORDS + ROW.words * start), "row_slots": row_slots,
            "last_token": self._last_token.data_ptr(), "bias_token": self._biases[0].data_ptr(),
            "bias_value": self._biases[1].data_ptr(), "prompt_seen": seen, "output_counts": output,
            "masks": masks,
        }  # fmt: skip
        return Addresses(
            tables=tables, arena=self._arena.data_ptr(), counters=self._counters.data_ptr(),
            logits=self._logits.data_ptr() + 4 * self.vocab_size * start,
        )  # fmt: skip

    # -- after it ---------------------------------------------------------------------------------------------------

    def collect(self, rows: SampleRows) -> Callable[[], Sampled]:
        """Start to copy the result; calling what it returns waits for it and brings the host's tables up to date."""
        index, count, top = self._next, len(rows.slots), rows.num_logprobs
        self._next = (index + 1) % RING
        staging, mark = self._staging[index], self._marks[index]
        at, places = 0, dict[str, int]()
        for name in self._sizes if top else ():
            places[name] = at
            if count:
                self._backend.download(
                    staging.data_ptr() + at, self._results[name].data_ptr(), self._sizes[name] * count
                )
            at += self._sizes[name] * count
        mark.record()
        slots, penalties = rows.slots, rows.penalties
        ring = self._ring[index * self._ring_bytes : (index + 1) * self._ring_bytes]

        def result() -> Sampled:
            sampled = _read(staging, mark, places, count, top) if top else _tokens(ring, mark, count)
            real = slots >= 0
            self.tables.last_token[slots[real]] = sampled.token_ids[real]
            if penalties and self.tables.output_counts is not None:
                counts = self.tables.output_counts
                for slot, token in zip(slots[real].tolist(), sampled.token_ids[real].tolist(), strict=True):
                    counts[slot, token] = min(int(counts[slot, token]) + 1, 65535)
            return sampled

        return result


def variant_of(rows: SampleRows) -> str:
    """The least that serves these rows."""
    if rows.penalties or rows.num_logprobs or len(rows.bias_token) or rows.mask is not None:
        return FULL  # a target comes with log-probabilities
    return SAMPLED if rows.random else GREEDY


def _occurrences(slots: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """How often each row's slot stands before it."""
    order = np.argsort(slots, kind="stable")
    ordered = slots[order]
    first = np.searchsorted(ordered, ordered, side="left")
    result = np.empty(len(slots), np.int64)
    result[order] = np.arange(len(slots)) - first
    return result


def _chunks(rows: SampleRows, most: int) -> list[tuple[int, int]]:
    """Rows to launch together: at most ``most``; with penalties, none of a slot that is there already."""
    result, start, seen = [], 0, set[int]()
    for row, slot in enumerate(rows.slots.tolist()):
        if row - start == most or (rows.penalties and slot >= 0 and slot in seen):
            result.append((start, row))
            start, seen = row, set()
        seen.add(slot)
    return [*result, (start, len(rows.slots))]


def _tokens(ring: torch.Tensor, mark: Mark, count: int) -> Sampled:
    """Tokens alone, out of their place in the ring, once they are there."""
    mark.wait()
    tokens = ring.numpy()[: 4 * count].view(np.int32).copy()
    none = np.empty((0, 0), np.int32)
    return Sampled(tokens, np.empty(0, np.float32), np.empty(0, np.int32), none, none.astype(np.float32))


def _read(staging: torch.Tensor, mark: Mark, places: Mapping[str, int], count: int, top: int) -> Sampled:
    """Results out of a staging buffer, once they are there."""
    mark.wait()
    words = staging.numpy()

    def column(name: str, dtype: type, width: int) -> Any:
        start = places[name]
        return words[start : start + 4 * count * width].view(dtype).reshape(count, width)

    tokens = column("sampled", np.int32, 1)[:, 0].copy()
    return Sampled(
        tokens, column("logprob", np.float32, 1)[:, 0].copy(), column("rank", np.int32, 1)[:, 0].copy(),
        column("top_ids", np.int32, TOP)[:, :top].copy(), column("top_logprobs", np.float32, TOP)[:, :top].copy(),
    )  # fmt: skip


def _clear(memory: torch.Tensor) -> None:
    memory.zero_()


__all__ = ["FULL", "FULL_ROWS", "GREEDY", "ROW", "SAMPLED", "TOP", "GpuSampler", "RowLayout", "variant_of"]
