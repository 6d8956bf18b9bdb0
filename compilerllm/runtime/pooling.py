"""The engine of models without states: whole sequences in, one vector or one row of labels each out.

Requests run in the order in which they came (or by priority), as many a step as its tokens and sequences allow. Nothing
is kept from one step to the next, so that there are no blocks, no slots and nothing to preempt.
"""

import asyncio
import logging
import os
import time
from collections import deque
from collections.abc import AsyncIterator
from collections.abc import Sequence as Items
from itertools import accumulate
from typing import Literal

import numpy as np
import numpy.typing as npt

from compilerllm import compile_watch
from compilerllm.config import SchedulerConfig
from compilerllm.errors import InvalidParameter
from compilerllm.ir.step import Executable, Float32, StepInputs
from compilerllm.runtime.admission import Limits
from compilerllm.runtime.messages import Batch, Delta, ModelFacts, Pool, PoolingFacts, Ready, Request, Stats

Float64 = npt.NDArray[np.float64]

log = logging.getLogger(__name__)


class PoolingEngine:
    """Driven by its caller as ``InProcessEngine`` is: ``submit``, then ``step`` while ``has_unfinished``."""

    def __init__(
        self,
        model: Executable,
        scheduler: SchedulerConfig | None = None,
        *,
        facts: ModelFacts,
        max_model_len: int | None = None,
    ) -> None:
        """``max_model_len`` is the user's wish. Raises ``InvalidParameter`` if the model or a step has no room for it."""
        assert facts.pooling is not None, "this model pools nothing"
        self._scheduler = scheduler or SchedulerConfig()
        widest = max(model.buckets, key=lambda b: (b.tokens, b.sequences))
        self._max_tokens = min(self._scheduler.max_num_batched_tokens, widest.tokens)
        self._max_seqs = min(self._scheduler.max_num_seqs, widest.sequences)
        possible = min(model.max_model_len, self._max_tokens)
        longest = possible if max_model_len is None else max_model_len
        if longest > possible:
            raise InvalidParameter(
                f"--max-model-len is {longest}, but the model takes {model.max_model_len} tokens, and a step, which must hold a "
                f"whole sequence, {self._max_tokens}. Ask for no more than {possible}, or raise --max-num-batched-tokens.",
                "max_model_len",
            )
        model.allocate(1, self._max_seqs)
        self._model, self._facts, self._pooling = model, facts, facts.pooling
        self._inbox: deque[Request | str] = deque()
        self._waiting: list[Request] = []
        self._open: set[str] = set()
        self._steps = self._prompt_tokens = self._running = 0
        self.ready = self._describe(longest)
        self.limits = Limits.of(self.ready)
        self.last_stats = self.stats()

    def _describe(self, longest: int) -> Ready:
        p = self._pooling
        what = f"{p.width} labels, {p.activation}" if p.task == "classify" else (
            f"{p.width} wide, {p.pooling} pooling{', normalised' if p.normalize else ''}"
        )  # fmt: skip
        return Ready(
            model=self._facts.model,
            target=self._facts.target,
            max_model_len=longest,
            vocab_size=p.vocab_size,
            blocks_total=0,
            block_size=0,
            max_open_requests=self._scheduler.max_open_requests,
            policy=self._scheduler.policy,
            pid=os.getpid(),
            compile_events=compile_watch.counts(),
            pooling=p,
            card={
                **self._facts.card,
                "pooling": f"{p.task}: {what}; sequences of up to {longest} tokens",
                "compile events": compile_watch.text(),
            },
        )

    @property
    def health(self) -> Literal["ready"]:
        """An engine in one's own process cannot die alone."""
        return "ready"

    def submit(self, request: Request) -> None:
        """Queue a request. Raises ``InvalidParameter`` or ``QueueFull``."""
        if request.request_id in self._open:
            raise ValueError(f"request id {request.request_id!r} is open already")
        self.limits.check(request, len(self._open))
        self._open.add(request.request_id)
        self._inbox.append(request)

    def abort(self, request_ids: Items[str]) -> None:
        """End requests with "abort" at the next step. Unknown ids are ignored."""
        self._inbox.extend(request_ids)

    def has_unfinished(self) -> bool:
        """Whether ``step`` has anything to do."""
        return bool(self._inbox or self._waiting)

    async def stream(self) -> AsyncIterator[Batch | Stats]:
        """Step in a thread for ever and yield what is to be told; sleeps while there is nothing to do."""
        while True:
            if not self.has_unfinished():
                await asyncio.sleep(0.002)
            elif (batch := await asyncio.to_thread(self.step)).deltas:
                yield batch

    def close(self) -> None:
        """Nothing runs beside ``step``."""

    def step(self) -> Batch:
        """Run the next requests that fit a step. Returns what became of them, and of those that were aborted."""
        deltas = self._receive()
        chosen = self._schedule()
        if chosen:
            self._running = len(chosen)
            start = time.monotonic()
            try:
                results = self._run(chosen)
            except Exception as error:
                log.exception("A step of %d sequences failed.", len(chosen))
                message = f"The model failed in a step of this request: {type(error).__name__}: {error}"
                deltas += [
                    Delta(request_id=r.request_id, token_ids=[], finish_reason="error", error=message)
                    for r in chosen
                ]
            else:
                took = time.monotonic() - start
                deltas += [
                    Delta(
                        request_id=request.request_id,
                        token_ids=[],
                        finish_reason="stop",
                        embedding=vector.astype(np.float32).tobytes(),
                        queue_seconds=max(0.0, start - request.arrival_time),
                        prefill_seconds=took,
                    )
                    for request, vector in zip(chosen, results, strict=True)
                ]
            self._running = 0
        for delta in deltas:
            self._open.discard(delta.request_id)
        self.last_stats = self.stats()
        return Batch(deltas=deltas, stats=self.last_stats)

    def stats(self) -> Stats:
        """The present load and counters since the start."""
        return Stats(
            num_running=self._running,
            num_waiting=len(self._waiting),
            prompt_tokens=self._prompt_tokens,
            steps=self._steps,
            compile_events={k: n for k, n in compile_watch.counts().items() if n},
        )

    def _receive(self) -> list[Delta]:
        aborted = []
        while self._inbox:
            item = self._inbox.popleft()
            if isinstance(item, Request):
                self._waiting.append(item)
            elif any(r.request_id == item for r in self._waiting):
                self._waiting = [r for r in self._waiting if r.request_id != item]
                aborted.append(Delta(request_id=item, token_ids=[], finish_reason="abort"))
        if self._scheduler.policy == "priority":
            self._waiting.sort(key=lambda r: (r.priority, r.arrival_time))
        return aborted

    def _schedule(self) -> list[Request]:
        count = tokens = 0
        for request in self._waiting[: self._max_seqs]:
            tokens += len(request.prompt_token_ids)
            if tokens > self._max_tokens:
                break
            count += 1
        chosen, self._waiting = self._waiting[:count], self._waiting[count:]
        return chosen

    def _run(self, requests: list[Request]) -> list[Float32]:
        """What each request gets, from one step."""
        lengths = [len(r.prompt_token_ids) for r in requests]
        start = np.array([0, *accumulate(lengths)], np.int32)
        wanted = [_rows(r.pool or Pool(), self._pooling, n) for r, n in zip(requests, lengths, strict=True)]
        types = np.zeros(start[-1], np.int32) if self._pooling.token_types else None
        for request, begin, end in zip(requests, start, start[1:], strict=False):
            if types is not None and request.pool is not None and request.pool.second is not None:
                types[begin + request.pool.second : end] = 1
        self._model.forward(
            StepInputs(
                token_ids=np.array([t for r in requests for t in r.prompt_token_ids], np.int32),
                positions=np.concatenate([np.arange(n, dtype=np.int32) for n in lengths]),
                query_start=start,
                seq_lens=np.array(lengths, np.int32),
                block_tables=np.zeros((1, len(requests), 1), np.int32),
                slots=np.arange(len(requests), dtype=np.int32),
                sample_rows=np.concatenate(
                    [np.arange(*span, dtype=np.int32) + s for span, s in zip(wanted, start, strict=False)]
                ),
                adapter_id=np.zeros(start[-1], np.int32),
                token_types=types,
            )
        )
        self._steps += 1
        self._prompt_tokens += int(start[-1])
        rows = np.split(self._model.logits(), np.cumsum([b - a for a, b in wanted])[:-1])
        return [finish(part, r.pool or Pool(), self._pooling) for part, r in zip(rows, requests, strict=True)]


def _rows(pool: Pool, facts: PoolingFacts, length: int) -> tuple[int, int]:
    """Which rows of a sequence are wanted, from and to."""
    if pool.each_token or facts.pooling == "mean":
        return 0, length
    return (0, 1) if facts.pooling == "cls" else (length - 1, length)


def finish(rows: Float32, pool: Pool, facts: PoolingFacts) -> Float32:
    """A sequence's wanted rows [n, width] as what it gets: one row, or each token's."""
    wide = rows.astype(np.float64)
    found = wide if pool.each_token else wide.mean(0, keepdims=True)
    if facts.task == "classify":
        active = pool.activate is not False
        return _activate(found, facts.activation if active else "identity").astype(np.float32)
    if pool.dimensions is not None:
        found = found[:, : pool.dimensions]
    if facts.normalize if pool.activate is None else pool.activate:
        found = found / np.maximum(np.linalg.norm(found, axis=1, keepdims=True), 1e-12)
    return found.astype(np.float32)


def _activate(rows: Float64, name: str) -> Float64:
    if name == "sigmoid":
        return 1.0 / (1.0 + np.exp(-rows))
    if name == "softmax":
        powers = np.exp(rows - rows.max(1, keepdims=True))
        shares: Float64 = powers / powers.sum(1, keepdims=True)
        return shares
    return rows
