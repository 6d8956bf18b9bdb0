"""The engine: one overlapped loop over scheduler, pool, runner and executable, in the caller's process.

receive    take in submitted and aborted requests
schedule   step n+1, while step n runs on the device, or on the worker thread
launch     step n+1, if the device takes it in behind step n
collect    wait for step n
launch     step n+1, otherwise
commit     step n: stops, rollbacks, deltas; step n+1 runs meanwhile
complete   step n+1, if what it may sample depends on the tokens of step n (a grammar): its forward runs already

A device that is told of step n+1 before step n has ended never waits for the host, which has the whole of a step's time
to commit one and to schedule another. Blocks need no more care for it: what the commit of step n frees is in no step
that is still to end (the scheduler keeps what a later step holds until that one's commit; blocks before a window are
read by nobody any more), and who gets it next is scheduled after the commit, so that on one stream its writes come after
every read that was launched before.
"""

import asyncio
import logging
import os
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from collections.abc import Sequence as Items
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Literal

from compilerllm import compile_watch
from compilerllm.config import CacheConfig, SchedulerConfig
from compilerllm.errors import InvalidParameter, KVCacheTooSmall
from compilerllm.ir.step import Bucket, Executable, Pending, Sampled, is_asynchronous
from compilerllm.runtime.admission import Limits
from compilerllm.runtime.block_pool import BlockPool
from compilerllm.runtime.constraints import Constraint, GrammarCompiler
from compilerllm.runtime.memory import Planned, count_blocks
from compilerllm.runtime.messages import Batch, Delta, ModelFacts, Ready, Request, Stats
from compilerllm.runtime.runner import Launch, Runner
from compilerllm.runtime.scheduler import Scheduler
from compilerllm.runtime.sequence import Sequence
from compilerllm.runtime.speculation import Drafter

log = logging.getLogger(__name__)


class InProcessEngine:
    """An engine driven by its caller: ``submit``, then ``step`` while ``has_unfinished``.

    ``submit`` and ``abort`` may be called from any thread; ``step`` from one at a time. With ``async_scheduling`` a
    step's deltas come with the call after the one that started it, so the first call after idling returns none.
    """

    def __init__(
        self,
        model: Executable,
        scheduler: SchedulerConfig | None = None,
        cache: CacheConfig | None = None,
        *,
        max_model_len: int | None = None,
        facts: ModelFacts | None = None,
        drafter: Drafter | None = None,
        max_drafts: int = 0,
        grammars: GrammarCompiler | None = None,
        max_stream_rate: int = 0,
    ) -> None:
        """``max_model_len`` is the user's wish; without one, the KV blocks may shorten the model's own limit.
        ``grammars``: for requests whose output must have a form. ``max_stream_rate``: deltas a second; what a sequence
        gets before its turn comes is told with its next delta. 0: every step tells all.

        Raises ``KVCacheTooSmall`` if the wish, or a single block, does not fit, ``InvalidParameter`` if the wish is
        beyond what the model can do.
        """
        scheduler, cache = scheduler or SchedulerConfig(), cache or CacheConfig()
        widest = widest_bucket(model.buckets)
        max_num_seqs = (
            scheduler.max_num_seqs if widest is None else min(scheduler.max_num_seqs, widest.sequences)
        )
        longest = max_model_len or model.max_model_len
        if longest > model.max_model_len:
            raise InvalidParameter(
                f"--max-model-len is {longest}, but the model's context ends at {model.max_model_len} tokens. "
                "Ask for no more than that.",
                "max_model_len",
            )
        num_blocks = _count_blocks(model, cache, longest, max_num_seqs)
        pool = BlockPool(
            model.groups,
            num_blocks,
            max_num_seqs,
            enable_prefix_caching=cache.enable_prefix_caching,
            max_ahead=max_ahead(scheduler, longest, widest, max_drafts),
        )
        longest = _fit(longest, pool, must_hold=max_model_len is not None)
        if any(group.rollback == "none" for group in model.groups):
            drafter = None  # what a rejected draft wrote could not be undone
        self._facts = facts or ModelFacts(model="model", target="cpu")
        self.scheduler = Scheduler(
            scheduler, pool, max_model_len=longest, widest=widest, drafter=drafter, max_drafts=max_drafts
        )
        self._runner = Runner(model, num_blocks, max_num_seqs, longest)
        self.ready = self._describe(model, pool, longest, max_num_seqs, scheduler)
        self.limits = Limits.of(self.ready)
        self._on_device = is_asynchronous(model)
        overlap = scheduler.async_scheduling
        if overlap is None:  # a step that keeps all cores busy would only wait for the host to get off one
            overlap = self._on_device or model.leaves_host_free
        self._overlap = overlap and drafter is None  # a draft's fate decides the next step
        self._queues = self._overlap and self._on_device  # steps are launched behind the running one
        threaded = self._overlap and not self._on_device
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="step") if threaded else None
        self._running: deque[tuple[Launch, Pending]] = deque()  # in order; two only while ``step`` runs
        self._inbox: deque[Request | str] = deque()  # requests, and ids to abort
        self._grammars = grammars
        self._compiling: dict[str, tuple[Request, Future[Callable[[], Constraint]]]] = {}
        self._refused: list[Delta] = []  # of requests whose grammar cannot be made
        self._open: set[str] = set()
        self._seconds_a_delta = 1 / max_stream_rate if max_stream_rate else 0.0
        self._untold: dict[str, Sequence] = {}  # what has tokens that no delta had room for yet
        self._told = 0.0  # when all was told last
        self.last_stats = self.stats()  # as of the last step; safe to read from any thread

    def _describe(
        self, model: Executable, pool: BlockPool, longest: int, max_num_seqs: int, scheduler: SchedulerConfig
    ) -> Ready:
        paged = [g for g in model.groups if g.addressing == "paged"]
        size = max((g.block_size for g in paged), default=0)
        mebibytes = pool.num_blocks * sum(g.bytes_per_block for g in paged) / 2**20
        blocks = f"{pool.num_blocks} of {size} tokens, {mebibytes:.0f} MiB; {max_num_seqs} sequences of up to {longest}"
        model_lines = getattr(model, "card_lines", dict[str, str])()  # what it knows from ``allocate`` on
        return Ready(
            model=self._facts.model,
            target=self._facts.target,
            max_model_len=longest,
            vocab_size=model.vocab_size,
            blocks_total=pool.num_blocks,
            block_size=size,
            max_open_requests=scheduler.max_open_requests,
            policy=scheduler.policy,
            pid=os.getpid(),
            compile_events=compile_watch.counts(),
            card={
                **self._facts.card,
                "KV blocks": blocks,
                **model_lines,
                "compile events": compile_watch.text(),
            },
        )

    @property
    def health(self) -> Literal["ready"]:
        """An engine in one's own process cannot die alone."""
        return "ready"

    # -- the face's side ------------------------------------------------------------------------------------------

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
        """Whether ``step`` has anything to do, be it only to take in what a running step leaves behind."""
        waits = self._inbox or self._running or self._compiling or self._refused
        return bool(waits) or self.scheduler.has_unfinished()

    async def stream(self) -> AsyncIterator[Batch | Stats]:
        """Step in a thread for ever and yield what is to be told; sleeps while there is nothing to do."""
        while True:
            if not self.has_unfinished():
                await asyncio.sleep(0.002)
            elif (batch := await asyncio.to_thread(self.step)).deltas:
                yield batch

    def close(self) -> None:
        """Wait for what runs, and stop the worker thread."""
        while self._running:
            self._discard()
        if self._worker is not None:
            self._worker.shutdown()
        if self._grammars is not None:
            self._grammars.close()

    # -- the loop -------------------------------------------------------------------------------------------------

    def step(self) -> Batch:
        """One turn of the loop. Returns what the step that ended in it has to tell."""
        self._receive()
        step = self.scheduler.schedule()
        ahead = None if step is None else self._runner.prepare(step)
        queued = ahead is not None and self._queues
        if ahead is not None and queued:
            self._launch(ahead)
        ended = self._collect() if len(self._running) > queued else None
        if ended is not None and isinstance(ended[1], Exception) and ahead is not None:
            if queued:
                if ahead.late is not None:
                    self._runner.complete(ahead)
                self._discard()
            self.scheduler.cancel(ahead.step, ran=queued)  # it may continue from tokens that never came
            ahead = None
        if ahead is not None and not queued:
            self._launch(ahead)
            if not self._overlap:
                ended = self._collect()
        if ended is None and ahead is None and self._compiling:
            wait((future for _, future in self._compiling.values()), 0.01, FIRST_COMPLETED)
        elif ended is None and ahead is None and self.scheduler.num_open:
            raise RuntimeError(f"no request can advance: {self.scheduler.stats()}")
        touched = self._commit(*ended) if ended is not None else []
        if ahead is not None and ahead.late is not None:
            self._runner.complete(ahead)
        return self._report(touched + self.scheduler.take_unreported())

    def _receive(self) -> None:
        while self._inbox:
            item = self._inbox.popleft()
            if not isinstance(item, Request):
                self._abort(item)
            elif item.params.structured is None:
                self.scheduler.add(item)
            elif self._grammars is None:
                self._refuse(item, InvalidParameter("This engine has no backend for structured output."))
            else:
                self._compiling[item.request_id] = item, self._grammars.start(item.params.structured)
        for request, future in [c for c in self._compiling.values() if c[1].done()]:
            del self._compiling[request.request_id]
            if (error := future.exception()) is not None:
                self._refuse(request, error)
            else:
                self.scheduler.add(request, future.result()())

    def _abort(self, request_id: str) -> None:
        if self._compiling.pop(request_id, None) is None:
            self.scheduler.abort(request_id)
        else:
            self._refused.append(Delta(request_id=request_id, token_ids=[], finish_reason="abort"))

    def _refuse(self, request: Request, error: BaseException) -> None:
        """End a request before it was queued: what it asks for cannot be made."""
        form, ours = request.params.structured, isinstance(error, InvalidParameter)
        if not ours:
            log.error("A grammar could not be compiled.", exc_info=error)
        self._refused.append(
            Delta(
                request_id=request.request_id,
                token_ids=[],
                finish_reason="error",
                error=str(error) if ours else f"the grammar compiler failed: {error}",
                refused=form.param if ours and form is not None else None,
            )
        )

    def _launch(self, launch: Launch) -> None:
        pending: Pending
        if self._on_device:
            pending = self._runner.enqueue(launch)
        elif self._worker is not None:
            pending = self._worker.submit(self._runner.execute, launch)
        else:
            pending = self._runner.run(launch)
        self._running.append((launch, pending))

    def _collect(self) -> tuple[Launch, Sampled | Exception | None]:
        """Wait for the oldest running step. Returns it with its samples, or with what it raised."""
        launch, pending = self._running.popleft()
        try:
            return launch, pending.result()
        except Exception as error:  # noqa: BLE001 - whatever it is, _commit tells the requests
            return launch, error

    def _discard(self) -> None:
        """Wait for the oldest running step, whose result nobody wants."""
        launch, outcome = self._collect()
        if isinstance(outcome, Exception):
            log.error("A step of %d sequences failed too.", len(launch.step.chunks), exc_info=outcome)

    def _commit(self, launch: Launch, outcome: Sampled | Exception | None) -> list[Sequence]:
        if isinstance(outcome, Exception):
            log.error("A step of %d sequences failed.", len(launch.step.chunks), exc_info=outcome)
            touched = self.scheduler.fail(launch.step)
            for seq in touched:
                if seq.finish_reason == "error":
                    seq.error = (
                        f"The model failed in a step of this request: {type(outcome).__name__}: {outcome}"
                    )
            return touched
        return self.scheduler.commit(launch.step, *self._runner.results(launch.step, outcome))

    def _report(self, touched: list[Sequence]) -> Batch:
        deltas, self._refused = self._refused, []
        for delta in deltas:
            self._open.discard(delta.request_id)
        for seq in self._to_tell(touched):
            deltas.append(_delta(seq))
            if seq.finish_reason is not None:
                self._open.discard(seq.request_id)
        self.last_stats = self.stats()
        return Batch(deltas=deltas, stats=self.last_stats)

    def _to_tell(self, touched: list[Sequence]) -> Items[Sequence]:
        """All that has something to report; before the next turn of all, only what begins or ends.

        A face spends some 50 us on a delta, whether it has one token or five. With many streams and short steps that is
        more than a core has, and where the model runs on the same cores, they would lack it.
        """
        if not self._seconds_a_delta:
            return touched
        self._untold |= {seq.request_id: seq for seq in touched}
        now = time.monotonic()
        if now >= self._told + self._seconds_a_delta * len(self.scheduler.running):
            self._told, told = now, list(self._untold.values())
            self._untold.clear()
            return told
        urgent = [seq for seq in touched if seq.finish_reason is not None or not seq.reported]
        for seq in urgent:
            del self._untold[seq.request_id]
        return urgent

    def stats(self) -> Stats:
        """The present load and counters since the start."""
        return self.scheduler.stats({k: n for k, n in compile_watch.counts().items() if n})


def widest_bucket(buckets: tuple[Bucket, ...]) -> Bucket | None:
    """The bucket that bounds every step: the one with most tokens, then most sequences. None = no bounds."""
    return max(buckets, key=lambda b: (b.tokens, b.sequences, b.rows, b.max_query), default=None)


def max_ahead(scheduler: SchedulerConfig, longest: int, widest: Bucket | None, max_drafts: int = 0) -> int:
    """Positions of a sequence that may be scheduled and not settled: two steps may be under way, one runs, one is planned."""
    chunk = min(scheduler.max_prefill_chunk or longest, scheduler.max_num_batched_tokens)
    chunk = chunk if widest is None else min(chunk, widest.max_query)
    return max(2 * chunk, 1 + max_drafts)


def _count_blocks(model: Executable, cache: CacheConfig, longest: int, max_num_seqs: int) -> int:
    """Blocks that the executable's memory, or else the host's, has room for."""
    if not is_asynchronous(model):
        plan = model.memory_plan(max_num_seqs) if isinstance(model, Planned) else None
        return count_blocks(cache, model.groups, max_model_len=longest, max_num_seqs=max_num_seqs, plan=plan)
    return model.count_blocks(
        cache.memory_utilization,
        max_num_seqs,
        longest,
        kv_cache_bytes=cache.kv_cache_bytes,
        num_blocks=cache.num_blocks,
        memory_bytes=cache.memory_bytes,
    )


def _fit(longest: int, pool: BlockPool, *, must_hold: bool) -> int:
    """The context length that the pool can hold. Raises ``KVCacheTooSmall`` if the user asked for more."""
    room = pool.max_tokens
    if room is None or room >= longest:
        return longest
    if must_hold:
        raise KVCacheTooSmall(
            f"The KV cache has {pool.num_blocks} blocks, room for one sequence of {room} tokens, but --max-model-len "
            f"asks for {longest}. Raise --kv-cache-bytes (or --num-blocks), or lower --max-model-len."
        )
    return room


def _delta(seq: Sequence) -> Delta:
    """What is new of ``seq``, with the figures of its start the first time."""
    tokens, seq.new_tokens = seq.new_tokens, []
    logprobs, seq.new_logprobs = seq.new_logprobs or None, []
    if logprobs is None and seq.params.logprobs is not None:
        logprobs = []
    if seq.reported:
        return Delta(
            request_id=seq.request_id,
            token_ids=tokens,
            logprobs=logprobs,
            finish_reason=seq.finish_reason,
            stop_reason=seq.stop_reason,
            error=seq.error,
            num_preemptions=seq.num_preemptions,
        )
    seq.reported = bool(tokens) or seq.finish_reason is not None
    start = seq.first_scheduled
    return Delta(
        request_id=seq.request_id,
        token_ids=tokens,
        logprobs=logprobs,
        finish_reason=seq.finish_reason,
        stop_reason=seq.stop_reason,
        error=seq.error,
        prompt_logprobs=seq.prompt_scores if seq.params.prompt_logprobs is not None else None,
        num_cached_tokens=seq.cached_tokens,
        num_preemptions=seq.num_preemptions,
        queue_seconds=0.0 if start is None else max(0.0, start - seq.request.arrival_time),
        prefill_seconds=0.0 if start is None or seq.first_token is None else seq.first_token - start,
    )
