"""From a step of sequences to the arrays a program takes and back, and the device tables by slot."""

from array import array
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

import numpy as np

from compilerllm.ir.step import (
    Executable,
    Int32,
    Pending,
    Sampled,
    SampleRows,
    StepInputs,
    is_asynchronous,
)
from compilerllm.runtime.constraints import Constraint, mask_rows
from compilerllm.runtime.messages import TokenLogprobs
from compilerllm.runtime.sequence import Sequence
from compilerllm.runtime.step import Chunk, Step


@dataclass(eq=False)
class Launch:
    """A step made ready: everything ``execute`` needs, so that sequences may change while it runs.

    A step is ``late`` if what may be sampled in it depends on tokens that are not known yet: its forward may run, but
    ``rows`` are there only after ``complete``.
    """

    step: Step
    inputs: StepInputs
    rows: SampleRows | None  # None: no row is sampled, or the step is late
    late: "Future[SampleRows] | None" = None
    sampling: "_LateSampling | None" = None  # of a late step on an asynchronous executable


class _LateSampling:
    """The ``Pending`` of a step whose forward is on its way while its sampling is still to be enqueued."""

    def __init__(self) -> None:
        self.pending: Pending | None = None

    def result(self) -> Sampled | None:
        assert self.pending is not None, "the step has not been completed"
        return self.pending.result()


@dataclass(frozen=True, eq=False)
class _Batch:
    """What steps have in common in which the same sequences advance by one token each."""

    seqs: list[Sequence]
    slots: Int32  # [S]
    query_start: Int32  # [S+1]
    sample_rows: Int32  # [S]
    adapter_id: Int32  # [S]
    rows: SampleRows | None  # None: they differ from step to step


class Runner:
    """Feeds one executable. All run on the host's thread, but ``execute`` may run on a worker's."""

    def __init__(self, model: Executable, num_blocks: int, max_num_seqs: int, max_model_len: int) -> None:
        self._model = model
        self._device = model if is_asynchronous(model) else None
        self._tables = model.allocate(num_blocks, max_num_seqs)
        self._max_num_seqs = max_num_seqs
        sizes = [g.block_size for g in model.groups if g.addressing == "paged"]
        width = max((-(-max_model_len // size) for size in sizes), default=0)
        self._block_tables: Int32 = np.full((len(sizes), max_num_seqs, width), -1, np.int32)
        self._gathered: Int32 | None = None  # the last step's block tables
        self._gathered_slots: list[int] = []
        self._batch: _Batch | None = None

    # -- before ---------------------------------------------------------------------------------------------------

    def prepare(self, step: Step) -> Launch:
        """Arrays of ``step``, which the scheduler has just made. Fills the table rows of newly admitted sequences.

        Safe while an earlier step runs: a slot is given out only when no running step holds it.
        """
        for seq in step.admitted:
            self._fill_row(seq)
        seqs = [chunk.seq for chunk in step.chunks]
        for seq in seqs:
            if seq.resync:
                self._tables.draws[seq.slot] = seq.num_outputs
                self._tables.changed.add(seq.slot)
                seq.resync = False
        if step.num_tokens == step.num_rows == len(seqs):
            return self._prepare_decode(step, seqs)
        self._batch = None
        return self._prepare_any(step, seqs)

    def _prepare_any(self, step: Step, seqs: list[Sequence]) -> Launch:
        tokens: list[int] = []
        starts = [0]
        sample_rows: list[int] = []
        for chunk in step.chunks:
            seq, start, end = chunk.seq, chunk.start, chunk.end
            known = seq.tokens[start:end]
            tokens += known
            if chunk.drafts:
                tokens += chunk.drafts
            elif len(known) < end - start:
                tokens.append(-1 - seq.slot)
            starts.append(len(tokens))
            if chunk.scores:
                first = len(tokens) - end + chunk.score_start
                sample_rows += range(first, first + chunk.scores)
            sample_rows += range(len(tokens) - chunk.samples, len(tokens))
        slots = [seq.slot for seq in seqs]
        query_start: Int32 = np.array(starts, np.int32)
        lengths = query_start[1:] - query_start[:-1]
        seq_lens: Int32 = np.array([chunk.end for chunk in step.chunks], np.int32)
        positions = np.repeat(seq_lens - query_start[1:], lengths) + np.arange(len(tokens), dtype=np.int32)
        inputs = StepInputs(
            token_ids=np.frombuffer(array("i", tokens), np.int32),  # much faster than from the list
            positions=positions,
            query_start=query_start,
            seq_lens=seq_lens,
            block_tables=self._gather_tables(seqs, slots),
            slots=np.array(slots, np.int32),
            sample_rows=np.array(sample_rows, np.int32),
            adapter_id=_adapters(step.chunks, starts),
        )
        return self._make_launch(step, inputs) if sample_rows else Launch(step, inputs, None)

    def _make_launch(self, step: Step, inputs: StepInputs, rows: SampleRows | None = None) -> Launch:
        """``rows``: those known already; None has them made here, or later if they cannot be known yet."""
        if rows is None and any(
            c.seq.follows and c.seq.pending > c.samples for c in step.chunks if c.samples
        ):
            return Launch(step, inputs, None, Future())
        return Launch(step, inputs, rows or self._sample_rows(step.chunks))

    def complete(self, launch: Launch) -> None:
        """Make the rows of a late step, once the tokens of the step before are committed, and have them sampled."""
        assert launch.late is not None, "the step is not late"
        rows = self._sample_rows(launch.step.chunks)
        launch.late.set_result(rows)
        if launch.sampling is not None and launch.sampling.pending is None:
            assert self._device is not None
            launch.sampling.pending = _started(partial(self._device.enqueue_sample, rows))

    def _prepare_decode(self, step: Step, seqs: list[Sequence]) -> Launch:
        """One token and one sample a sequence. What the batch has had in its last step already is not made again."""
        batch, chunks = self._batch, step.chunks
        if batch is None or step.admitted or batch.seqs != seqs:
            batch = self._batch = self._begin_batch(step, seqs)
        slots = [seq.slot for seq in seqs]
        tokens = [
            seq.tokens[chunk.start] if chunk.start < len(seq.tokens) else -1 - seq.slot
            for seq, chunk in zip(seqs, chunks, strict=True)
        ]
        positions: Int32 = np.array([chunk.start for chunk in chunks], np.int32)
        inputs = StepInputs(
            token_ids=np.array(tokens, np.int32),
            positions=positions,
            query_start=batch.query_start,
            seq_lens=positions + 1,
            block_tables=self._gather_tables(seqs, slots),
            slots=batch.slots,
            sample_rows=batch.sample_rows,
            adapter_id=batch.adapter_id,
        )
        return self._make_launch(step, inputs, batch.rows)

    def _begin_batch(self, step: Step, seqs: list[Sequence]) -> _Batch:
        ends: Int32 = np.arange(len(seqs) + 1, dtype=np.int32)
        return _Batch(
            seqs=seqs,
            slots=np.array([seq.slot for seq in seqs], np.int32),
            query_start=ends,
            sample_rows=ends[:-1],
            adapter_id=np.array([seq.request.adapter_id for seq in seqs], np.int32),
            rows=None if any(seq.bans or seq.follows for seq in seqs) else self._sample_rows(step.chunks),
        )

    def _gather_tables(self, seqs: list[Sequence], slots: list[int]) -> Int32:
        """Block tables of the step's sequences [G, S, blocks], as wide as the longest of them."""
        changed = False
        for seq in seqs:
            if seq.tables_changed:
                changed = True
                seq.tables_changed = False
                for group, table in enumerate(seq.tables):
                    row = self._block_tables[group, seq.slot]
                    row[: len(table)] = table
                    row[len(table) :] = -1
        if changed or self._gathered is None or slots != self._gathered_slots:
            width = max((len(table) for seq in seqs for table in seq.tables), default=0)
            self._gathered = np.ascontiguousarray(self._block_tables[:, slots, :width])
            self._gathered_slots = slots
        return self._gathered

    def _fill_row(self, seq: Sequence) -> None:
        """Sampling parameters of a sequence that got its slot. One that comes back continues its random draws."""
        tables, slot, params = self._tables, seq.slot, seq.params
        tables.changed.add(slot)
        tables.temperature[slot] = params.temperature
        tables.top_k[slot] = min(
            max(0, params.top_k), self._model.vocab_size
        )  # the table is int32, a request is not
        tables.top_p[slot] = params.top_p
        tables.min_p[slot] = params.min_p
        tables.repetition_penalty[slot] = params.repetition_penalty
        tables.presence_penalty[slot] = params.presence_penalty
        tables.frequency_penalty[slot] = params.frequency_penalty
        tables.seed[slot] = seq.seed
        tables.draws[slot] = seq.num_outputs
        if params.penalised:
            if tables.prompt_counts is None:
                shape = (self._max_num_seqs, self._model.vocab_size)
                tables.prompt_counts, tables.output_counts = (
                    np.zeros(shape, np.uint16),
                    np.zeros(shape, np.uint16),
                )
            _count(tables.prompt_counts[slot], seq.tokens[: seq.num_prompt])
            _count(tables.output_counts[slot], seq.tokens[seq.num_prompt :])

    def _sample_rows(self, chunks: list[Chunk]) -> SampleRows:
        slots: list[int] = []
        start, tokens, values = [0], list[int](), list[float]()
        targets: list[int] = []
        limited: dict[int, list[Constraint]] = {}  # by row
        num_logprobs, penalties, random = 0, False, False
        for chunk in chunks:
            seq, params = chunk.seq, chunk.seq.params
            if chunk.scores:
                slots += [-1] * chunk.scores
                targets += [-1] * (len(start) - 1 - len(targets))
                targets += seq.tokens[chunk.score_start + 1 : chunk.score_start + 1 + chunk.scores]
                start += [len(tokens)] * chunk.scores
                num_logprobs = max(num_logprobs, params.prompt_logprobs or 0, 1)
            if not chunk.samples:
                continue
            if seq.constraints and seq.finish_reason is None:
                for row in range(len(slots), len(slots) + chunk.samples):
                    limited[row] = seq.constraints
            for row_index in range(chunk.samples):
                slots.append(seq.slot)
                if seq.bias:
                    tokens += [token for token, _ in seq.bias]
                    values += [value for _, value in seq.bias]
                if (
                    seq.bans
                    and chunk.end - chunk.samples + row_index + 1 - seq.num_prompt < params.min_tokens
                ):
                    tokens += seq.bans
                    values += [-np.inf] * len(seq.bans)
                start.append(len(tokens))
            if params.logprobs is not None:
                num_logprobs = max(num_logprobs, params.logprobs, 1)
            penalties = penalties or params.penalised
            random = random or params.temperature > 0.0
        if targets:
            targets += [-1] * (len(slots) - len(targets))
        return SampleRows(
            slots=np.array(slots, np.int32),
            bias_start=np.array(start, np.int32),
            bias_token=np.array(tokens, np.int32),
            bias_value=np.array(values, np.float32),
            num_logprobs=num_logprobs,
            penalties=penalties,
            random=random,
            mask=mask_rows(limited, len(slots), self._model.vocab_size),
            target=np.array(targets, np.int32) if targets else None,
        )

    # -- during ---------------------------------------------------------------------------------------------------

    def execute(self, launch: Launch) -> Sampled | None:
        """Run forward, then sampling, which waits for the rows of a late step. Raises whatever the executable raises."""
        self._model.forward(launch.inputs)
        rows = launch.rows if launch.late is None else launch.late.result()
        return None if rows is None else self._model.sample(rows)

    def run(self, launch: Launch) -> Pending:
        """``execute`` it now, on this thread."""
        done: Future[Sampled | None] = Future()
        try:
            done.set_result(self.execute(launch))
        except Exception as error:  # noqa: BLE001 - it is the step's outcome
            done.set_exception(error)
        return done

    def enqueue(self, launch: Launch) -> Pending:
        """Start it on an asynchronous executable; of a late step the forward alone."""
        device = self._device
        assert device is not None, "the executable is not asynchronous"
        if launch.late is None:
            return _started(lambda: device.enqueue(launch.inputs, launch.rows))
        launch.sampling = _LateSampling()
        slots = [s for c in launch.step.chunks for s in (*[-1] * c.scores, *[c.seq.slot] * c.samples)]
        try:
            device.enqueue_forward(launch.inputs, np.array(slots, np.int32))
        except Exception as error:  # noqa: BLE001 - it is the step's outcome
            launch.sampling.pending = _failed(error)
        return launch.sampling

    # -- after ----------------------------------------------------------------------------------------------------

    def results(
        self, step: Step, sampled: Sampled | None
    ) -> tuple[list[int], list[TokenLogprobs | None] | None]:
        """Token ids and log-probabilities row for row, as the scheduler's ``commit`` takes them."""
        if sampled is None:
            return [], None
        token_ids: list[int] = sampled.token_ids.tolist()
        if not len(sampled.logprob):
            return token_ids, None
        chosen, ranks = sampled.logprob.tolist(), sampled.rank.tolist()
        top_ids, top = sampled.top_ids.tolist(), sampled.top_logprobs.tolist()
        entries: list[TokenLogprobs | None] = []
        for chunk in step.chunks:
            params = chunk.seq.params
            for number, wanted in (
                (chunk.scores, params.prompt_logprobs),
                (chunk.samples, params.logprobs),
            ):
                rows = range(len(entries), len(entries) + number)
                entries += (
                    [None] * number
                    if wanted is None
                    else [
                        TokenLogprobs(chosen[r], ranks[r], top_ids[r][:wanted], top[r][:wanted]) for r in rows
                    ]
                )
        return token_ids, entries


def _started(start: Callable[[], Pending]) -> Pending:
    """What ``start`` gives, or a step that fails with what it raises."""
    try:
        return start()
    except Exception as error:  # noqa: BLE001 - it is the step's outcome
        return _failed(error)


def _failed(error: Exception) -> Pending:
    failed: Future[Sampled | None] = Future()
    failed.set_exception(error)
    return failed


def _adapters(chunks: list[Chunk], starts: list[int]) -> Int32:
    """The adapter of each token [T]."""
    adapters: Int32 = np.zeros(starts[-1], np.int32)
    for chunk, start in zip(chunks, starts, strict=False):
        if chunk.seq.request.adapter_id:
            adapters[start : start + chunk.end - chunk.start] = chunk.seq.request.adapter_id
    return adapters


def _count(row: "np.typing.NDArray[np.uint16]", tokens: list[int]) -> None:
    """Occurrences of each token id in ``row`` [V], saturated at the type's end."""
    row[:] = np.minimum(np.bincount(tokens, minlength=len(row)), 65535) if tokens else 0
