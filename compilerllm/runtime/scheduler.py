"""What runs next: decodes first, then prefill chunks up to the token budget; first come, first served, or by priority.

    add -> waiting --admit--> running --finish--> gone
              ^                  |
              +----- preempt ----+      (recomputed later, from shared blocks as far as they last)

``schedule`` may be called while earlier steps run; ``commit`` takes their results, in order. A block or slot is freed
only when no running step uses it: a sequence that ends or is preempted meanwhile keeps them until that step's commit.

Why it never stalls: a sequence takes blocks only from those after it in one fixed order (arrival, or priority and then
arrival), so the first always advances, and every request was checked at submission to fit the pool alone.
"""

import time
from bisect import insort
from collections import deque
from collections.abc import Callable, Mapping

from compilerllm.config import SchedulerConfig
from compilerllm.ir.step import Bucket
from compilerllm.runtime.block_pool import BlockPool
from compilerllm.runtime.constraints import Constraint
from compilerllm.runtime.messages import Request, Stats, TokenLogprobs
from compilerllm.runtime.sequence import Sequence, Status
from compilerllm.runtime.speculation import Drafter, count_accepted
from compilerllm.runtime.step import Chunk, Step


def _by_arrival(seq: Sequence) -> tuple[int, int]:
    return 0, seq.arrival


def _by_priority(seq: Sequence) -> tuple[int, int]:
    return seq.order


class Scheduler:
    """Sequences waiting and running, over one block pool. Knows no arrays and no clock but the one it is given."""

    def __init__(
        self,
        config: SchedulerConfig,
        pool: BlockPool,
        *,
        max_model_len: int,
        widest: Bucket | None = None,
        drafter: Drafter | None = None,
        max_drafts: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.pool = pool
        self.max_model_len = max_model_len
        self._order = _by_priority if config.policy == "priority" else _by_arrival
        self.waiting: deque[Sequence] = deque()  # in that order
        self.running: list[Sequence] = []  # likewise
        self.unreported: dict[str, Sequence] = {}  # ended outside a commit (abort, error)
        self._open: dict[str, Sequence] = {}
        self._leaving = 0  # preempted sequences that a running step still holds
        self._step_number = 0
        self._arrivals = 0
        self._clock = clock
        self._drafter = drafter
        self._max_drafts = max_drafts if drafter is not None else 0
        self._max_tokens = config.max_num_batched_tokens
        self._max_seqs = config.max_num_seqs
        self._max_chunk = config.max_prefill_chunk or self._max_tokens
        self._max_rows = self._max_tokens
        if widest is not None:
            self._max_tokens = min(self._max_tokens, widest.tokens)
            self._max_seqs = min(self._max_seqs, widest.sequences)
            self._max_rows = widest.rows
            self._max_chunk = min(self._max_chunk, widest.max_query)
            self._max_drafts = min(self._max_drafts, widest.max_query - 1)
        self._spare = max(
            1, pool.num_blocks // 100
        )  # kept free for running sequences when others are admitted
        self._prefix_queries = self._prefix_hits = self._preemptions = 0
        self._prompt_tokens = self._generation_tokens = self._steps = 0

    # -- requests ------------------------------------------------------------------------------------------------

    def add(self, request: Request, grammar: Constraint | None = None) -> Sequence:
        """Queue a request that passed ``Limits.check``; ``grammar`` is what was compiled for it."""
        assert request.request_id not in self._open, f"request id {request.request_id!r} is open already"
        seq = Sequence(request, self._arrivals, self.max_model_len, grammar)
        self._arrivals += 1
        self._open[seq.request_id] = seq
        insort(self.waiting, seq, key=self._order)
        return seq

    def abort(self, request_id: str) -> None:
        """End a request with "abort"; unknown ids are ignored. Its blocks are free at once or at the next commit."""
        seq = self._open.get(request_id)
        if seq is not None:
            self._end(seq, "abort")
            self.unreported[request_id] = seq

    def has_unfinished(self) -> bool:
        """Whether any request is open or any end is still to be reported."""
        return bool(self._open or self.unreported)

    @property
    def num_open(self) -> int:
        return len(self._open)

    # -- a step ahead --------------------------------------------------------------------------------------------

    def schedule(self) -> Step | None:
        """The next step, or None if nothing can run until a running step is committed."""
        self._step_number += 1
        step = Step(self._step_number)
        starved, lacking = self._schedule_decodes(step)
        if lacking:
            starved = self._schedule_prefills(step) or starved
        if not starved and not self._leaving:
            self._admit_waiting(step)
        if not step.chunks:
            return None
        for chunk in step.chunks:
            chunk.seq.in_flight += 1
        return step

    def _schedule_decodes(self, step: Step) -> tuple[bool, bool]:
        """One token, and drafts, of every sequence that lacks no more.

        Returns whether blocks ran out, and whether any sequence may lack more than one token.
        """
        chunks, number, starved, lacking = step.chunks, step.number, False, False
        rows, tokens = self._max_rows, self._max_tokens
        index = 0
        while index < len(self.running):  # preemption removes later ones meanwhile
            seq = self.running[index]
            index += 1
            start = seq.scheduled
            length = len(seq.tokens) + seq.pending
            if length - start != 1 or (seq.pending and length >= seq.limit):
                lacking = lacking or length - start > 1
                continue
            if tokens <= 0 or rows <= 0:
                lacking = True
                break
            drafts: list[int] | None = None
            if self._max_drafts and not seq.params.penalised and not seq.follows:
                if seq.in_flight:  # how many tokens it gets is not known yet
                    continue
                drafts = self._propose(seq, min(tokens, rows) - 1)
            end = start + 1 + (len(drafts) if drafts else 0)
            if end > seq.capacity and not self._make_room(seq, end):
                starved = True
                continue
            samples = end - start
            chunks.append(Chunk(seq, start, end, samples, drafts))
            seq.scheduled = end
            seq.pending += 1
            seq.step_number = number
            tokens -= samples
            rows -= samples
        step.num_tokens, step.num_rows = self._max_tokens - tokens, self._max_rows - rows
        return starved, lacking

    def _propose(self, seq: Sequence, most: int) -> list[int] | None:
        """Drafts for ``seq``, none of them past its end."""
        assert self._drafter is not None
        most = min(most, self._max_drafts, seq.limit - len(seq.tokens) - 1)
        return self._drafter.propose(seq.tokens, most)[:most] or None if most > 0 else None

    def _schedule_prefills(self, step: Step) -> bool:
        """Next chunks of admitted sequences that lack more than one token. Returns whether blocks ran out."""
        starved = False
        for seq in list(self.running):
            if seq.status is Status.RUNNING and not seq.leaving and seq.length - seq.scheduled > 1:
                end = self._chunk_end(seq, step)
                if end == seq.scheduled:
                    break
                if end > seq.capacity and not self._make_room(seq, end):
                    starved = True
                    continue
                self._append_prefill(step, seq, end)
        return starved

    def _chunk_end(self, seq: Sequence, step: Step) -> int:
        """Where the next chunk of a prefill ends, within what the step has left."""
        start = seq.scheduled
        end = start + min(seq.length - start, self._max_tokens - step.num_tokens, self._max_chunk)
        rows = self._max_rows - step.num_rows
        if (over := seq.scores_to(start, end) - rows) > 0:
            end = min(end, seq.num_prompt - 1) - over  # each token takes a row
        if end == seq.length and seq.scores_to(start, end) >= rows:
            end -= 1  # no row is left to sample from its last token
        return end

    def _append_prefill(self, step: Step, seq: Sequence, end: int) -> None:
        chunk = Chunk(
            seq, seq.scheduled, end, 1 if end == seq.length else 0, scores=seq.scores_to(seq.scheduled, end)
        )
        step.chunks.append(chunk)
        step.num_tokens += end - seq.scheduled
        step.num_rows += chunk.rows
        seq.scheduled = end
        seq.pending += chunk.samples
        seq.step_number = step.number

    def _admit_waiting(self, step: Step) -> None:
        """Start waiting sequences in order, as long as the step has room and the pool could hold their tokens."""
        while self.waiting and len(self.running) < self._max_seqs and step.num_tokens < self._max_tokens:
            seq = self.waiting[0]
            hit = self.pool.match(seq, share=seq.scored)  # a score needs its token computed
            if hit.awaited:  # cheaper to share that block, a step later, than to compute it twice
                break
            # Room for the token it samples too: a sequence that must preempt others at once had better wait.
            wanted = min(len(seq.tokens) + 1, self.max_model_len)
            if not self.pool.admit(seq, hit, wanted, spare=self._spare if self.running else 0):
                break
            self.waiting.popleft()
            seq.status = Status.RUNNING
            seq.computed = seq.scheduled = hit.tokens
            insort(self.running, seq, key=self._order)
            step.admitted.append(seq)
            if seq.first_scheduled is None:
                seq.first_scheduled = self._clock()
                seq.cached_tokens = hit.tokens
                self._prefix_queries += len(seq.tokens)
                self._prefix_hits += hit.tokens
            end = self._chunk_end(seq, step)
            if end == seq.scheduled:
                break
            reserved = self.pool.reserve(seq, end)
            assert reserved, f"{seq} was admitted without room for its first chunk"
            self._append_prefill(step, seq, end)

    # -- running out of blocks -----------------------------------------------------------------------------------

    def _make_room(self, seq: Sequence, end: int) -> bool:
        """Blocks for positions [0, end) of ``seq``, preempting later arrivals if need be. False: not in this step."""
        while not self.pool.reserve(seq, end):
            if self._leaving:  # blocks come back with the next commit; see then what is still lacking
                return False
            victim = self._latest_after(seq)
            if victim is None:
                return False
            self._preempt(victim)
        return True

    def _latest_after(self, seq: Sequence) -> Sequence | None:
        for victim in reversed(self.running):
            if victim is seq:
                return None
            if victim.step_number != self._step_number:
                return victim
        return None

    def _preempt(self, seq: Sequence) -> None:
        self._preemptions += 1
        seq.num_preemptions += 1
        self.running.remove(seq)
        if seq.in_flight:
            seq.leaving = True
            self._leaving += 1
        else:
            self._requeue(seq)

    def _requeue(self, seq: Sequence) -> None:
        self.pool.release(seq)
        seq.status = Status.WAITING
        seq.computed = seq.scheduled = 0
        insort(self.waiting, seq, key=self._order)

    # -- results -------------------------------------------------------------------------------------------------

    def commit(
        self, step: Step, token_ids: list[int], logprobs: list[TokenLogprobs | None] | None
    ) -> list[Sequence]:
        """Take a step's sampled tokens, row for row. Returns the sequences that have something to report."""
        self._steps += 1
        now = self._clock()
        touched: list[Sequence] = []
        row = 0
        for chunk in step.chunks:
            seq = chunk.seq
            scores, first, row = row, row + chunk.scores, row + chunk.rows
            seq.in_flight -= 1
            if chunk.samples:
                seq.pending -= 1
            if seq.finish_reason is not None:  # it ended while this step ran; the tokens are not wanted
                self._retire(seq)
                continue
            if chunk.scores:
                assert logprobs is not None, "scored rows have log-probabilities"
                seq.prompt_scores += [entry for entry in logprobs[scores:first] if entry is not None]
            if chunk.samples:
                self._accept(chunk, token_ids, logprobs, first, now)
                touched.append(seq)
            else:
                seq.computed = chunk.end
            self.pool.settle(seq)
            if seq.finish_reason is not None:
                self._end(seq, seq.finish_reason)
            elif seq.leaving and not seq.in_flight:
                seq.leaving = False
                self._leaving -= 1
                self._requeue(seq)
        return self._collect_unreported(touched)

    def _accept(
        self,
        chunk: Chunk,
        token_ids: list[int],
        logprobs: list[TokenLogprobs | None] | None,
        first: int,
        now: float,
    ) -> None:
        """Append the sampled tokens that hold, and roll back the rest of the chunk."""
        seq = chunk.seq
        if seq.first_token is None:
            seq.first_token = now
            self._prompt_tokens += seq.num_prompt
        count = 1
        if chunk.drafts:
            count += count_accepted(chunk.drafts, token_ids[first : first + chunk.samples])
            seq.computed = chunk.end - chunk.samples + count
            if count < chunk.samples:
                seq.scheduled = seq.computed
                seq.resync = True
                self.pool.truncate(seq, seq.computed)
        else:
            seq.computed = chunk.end
        for row in range(first, first + count):
            self._generation_tokens += 1
            if logprobs is not None and (entry := logprobs[row]) is not None:
                seq.new_logprobs.append(entry)
            seq.finish_reason = seq.append(token_ids[row])
            if seq.finish_reason is not None:
                break
        if seq.computed > len(seq.tokens):  # it ended within accepted drafts
            seq.computed = len(seq.tokens)

    def fail(self, step: Step) -> list[Sequence]:
        """A step raised: end the requests in it with "error". Returns the sequences that have something to report."""
        touched: list[Sequence] = []
        for chunk in step.chunks:
            seq = chunk.seq
            seq.in_flight -= 1
            if chunk.samples:
                seq.pending -= 1
            if seq.finish_reason is None:
                self._end(seq, "error")
                touched.append(seq)
            else:
                self._retire(seq)
        return self._collect_unreported(touched)

    def cancel(self, step: Step, *, ran: bool = False) -> None:
        """Undo the latest ``schedule``. Its sequences keep their slots and blocks.

        ``ran``: the step was started all the same, and its result is not wanted. Then those of its sequences that no
        other step holds begin anew, since what it did to slot states, draws and token counts cannot be undone.
        """
        for chunk in reversed(step.chunks):
            seq = chunk.seq
            seq.in_flight -= 1
            seq.scheduled = chunk.start
            if chunk.samples:
                seq.pending -= 1
            if seq.finish_reason is not None:
                self._retire(seq)
            elif ran and not seq.in_flight:
                self._preempt(seq)

    def _collect_unreported(self, touched: list[Sequence]) -> list[Sequence]:
        if self.unreported:
            touched += self.unreported.values()
            self.unreported = {}
        return touched

    def take_unreported(self) -> list[Sequence]:
        """Requests that ended outside a step, for the case that no step is running."""
        return self._collect_unreported([])

    def _end(self, seq: Sequence, reason: str) -> None:
        """Close a request. What it holds is freed now, or by ``_retire`` when its last running step is committed."""
        seq.finish_reason = reason
        del self._open[seq.request_id]
        if seq.status is Status.WAITING:
            self.waiting.remove(seq)
            seq.status = Status.FINISHED
            return
        seq.status = Status.FINISHED
        if seq.leaving:
            seq.leaving = False
            self._leaving -= 1
        else:
            self.running.remove(seq)
        self._retire(seq)

    def _retire(self, seq: Sequence) -> None:
        if not seq.in_flight:
            self.pool.release(seq)

    # -- facts ---------------------------------------------------------------------------------------------------

    def stats(self, compile_events: Mapping[str, int] | None = None) -> Stats:
        """Counters since the start and the present load."""
        return Stats(
            num_running=len(self.running),
            num_waiting=len(self.waiting) + self._leaving,
            blocks_total=self.pool.num_blocks,
            blocks_used=self.pool.num_used,
            prefix_queries=self._prefix_queries,
            prefix_hits=self._prefix_hits,
            num_preemptions=self._preemptions,
            prompt_tokens=self._prompt_tokens,
            generation_tokens=self._generation_tokens,
            steps=self._steps,
            compile_events=dict(compile_events or {}),
        )

    def check(self) -> None:
        """Raise ``AssertionError`` unless queues, sequences and the pool agree. O(sequences + blocks)."""
        self.pool.check()
        for name, seqs in (("waiting", self.waiting), ("running", self.running)):
            order = [self._order(seq) for seq in seqs]
            assert order == sorted(order), f"{name} is out of order: {order}"
        for seq in self.waiting:
            assert seq.status is Status.WAITING and not seq.in_flight and seq.slot < 0, (
                f"{seq} is in the queue"
            )
        for seq in self.running:
            assert seq.status is Status.RUNNING and seq.slot >= 0 and not seq.leaving, (
                f"{seq} is among the running"
            )
            end = seq.length + self._max_drafts
            assert 0 <= seq.computed <= seq.scheduled <= end, f"{seq} has its positions out of order"
            assert seq.pending <= seq.in_flight, f"{seq} waits for tokens of no step"
            assert seq.in_flight or seq.computed == seq.scheduled, f"{seq} runs nowhere but is not committed"
        leaving = len(self._open) - len(self.waiting) - len(self.running)
        assert leaving == self._leaving, (
            f"{leaving} open requests are in no queue, {self._leaving} are leaving"
        )
