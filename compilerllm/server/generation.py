"""One API request while it runs: its sequences, their texts, counts and times."""

import time
import uuid
from dataclasses import dataclass, field

from compilerllm.errors import GenerationFailed, InvalidParameter
from compilerllm.runtime.beams import BeamOptions
from compilerllm.runtime.messages import Delta, Request, ThinkingMarks, TokenLogprobs
from compilerllm.sampling_params import SamplingParams
from compilerllm.server.beams import BeamFeed
from compilerllm.server.metrics import Metrics
from compilerllm.server.records import current_record
from compilerllm.server.streams import EngineStreams, Feed
from compilerllm.text.output import SequenceText, TextDelta, compile_stops
from compilerllm.text.prompts import Prompt, Truncation, split_params
from compilerllm.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class PlanOptions:
    """What a request says beside its prompts and its sampling."""

    cache_salt: str | None = None
    priority: int = 0
    truncation: Truncation | None = None
    thinking: ThinkingMarks | None = None
    beams: BeamOptions | None = None  # a search for the likeliest sequences in place of sampling


PLAIN = PlanOptions()


@dataclass(frozen=True)
class Plan:
    """A validated request, ready to run: every prompt with every one of ``n`` sequences."""

    prompts: list[Prompt]
    params: list[SamplingParams]  # a set for each prompt; n not yet split
    options: PlanOptions = PLAIN
    bad_words: list[list[int]] = field(default_factory=list)  # token ids


class _Sequence:
    """One of the sequences; ``index`` is its place in the response's choices."""

    __slots__ = ("first_time", "index", "last_time", "prefill_seconds", "text")

    def __init__(self, index: int, text: SequenceText) -> None:
        self.index, self.text = index, text
        self.first_time = self.last_time = self.prefill_seconds = 0.0


class Generation:
    """Runs a plan. ``read`` gives what each step added, until an empty list."""

    def __init__(
        self, plan: Plan, streams: EngineStreams, tokenizer: Tokenizer, metrics: Metrics, arrived: float
    ) -> None:
        self.id = uuid.uuid4().hex
        self.plan = plan
        self._first: list[tuple[int, TextDelta]] = []
        self.prompt_scores: dict[
            int, list[TokenLogprobs]
        ] = {}  # by choice: of the prompt from its second token on
        self.prompt_tokens = sum(len(p.token_ids) for p in plan.prompts)
        self.cached_tokens = 0
        self.completion_tokens = 0
        self._metrics, self._arrived = metrics, arrived
        self._sequences: dict[str, _Sequence] = {}
        self._record = current_record()
        requests, beams = self._make_requests(plan, tokenizer), plan.options.beams
        self.feed: Feed = (
            streams.submit(requests)
            if beams is None
            else BeamFeed(streams, requests, plan.params[0].n, beams)
        )
        if self._record is not None:
            self._record.params = plan.params[0]
            self._record.num_sequences += self.num_sequences
            self._record.prompt_tokens += self.prompt_tokens
        for prompt, params in zip(plan.prompts, plan.params, strict=True):
            metrics.prompt_tokens.observe(len(prompt.token_ids))
            metrics.params_n.observe(params.n)
            metrics.params_max_tokens.observe(params.max_tokens or 0)
            metrics.max_num_generation_tokens.observe((params.max_tokens or 0) * params.n)

    def _make_requests(self, plan: Plan, tokenizer: Tokenizer) -> list[Request]:
        requests: list[Request] = []
        for prompt, shared in zip(plan.prompts, plan.params, strict=True):
            stops, eos = compile_stops(shared), tokenizer.eos_token_ids
            for params in split_params(shared):
                request_id = f"{self.id}-{len(requests)}"
                text = SequenceText(tokenizer, params, prompt.token_ids, eos, stops)
                self._sequences[request_id] = _Sequence(len(requests), text)
                requests.append(
                    Request(
                        request_id=request_id,
                        prompt_token_ids=prompt.token_ids,
                        params=params,
                        arrival_time=self._arrived,
                        eos_token_ids=eos,
                        cache_salt=plan.options.cache_salt,
                        priority=plan.options.priority,
                        bad_words=plan.bad_words,
                        thinking=plan.options.thinking,
                    )
                )
        return requests

    @property
    def num_sequences(self) -> int:
        return sum(params.n for params in self.plan.params)

    def prompt_of(self, index: int) -> Prompt:
        """The prompt that a choice continues."""
        return self.plan.prompts[index // self.plan.params[0].n]

    async def begin(self) -> None:
        """Wait for the first tokens, so that what the engine refuses is known before an answer is begun."""
        self._first = await self.read()

    async def read(self) -> list[tuple[int, TextDelta]]:
        """(choice index, what was added) for all that came since the last call; empty at the end or after ``close``.

        Raises ``GenerationFailed`` if the engine ended a sequence with an error; the others are aborted.
        """
        if self._first:
            first, self._first = self._first, []
            return first
        deltas = await self.feed.read()
        now = time.monotonic()
        added = []
        for delta in deltas:
            sequence = self._sequences.get(delta.request_id)
            if sequence is not None:  # else it ended at a stop string
                added.append((sequence.index, self._add(sequence, delta, now)))
        if deltas and not added:
            return await self.read()
        return added

    def _add(self, sequence: _Sequence, delta: Delta, now: float) -> TextDelta:
        if delta.finish_reason == "error":
            del self._sequences[delta.request_id]
            self._finished("error")
            self.close()
            if delta.refused is not None:
                raise InvalidParameter(delta.error or "the request cannot be run", delta.refused)
            raise GenerationFailed(delta.error or "the engine failed at this request")
        if delta.prompt_logprobs is not None:
            self.prompt_scores[sequence.index] = delta.prompt_logprobs
        if delta.token_ids:
            self._observe_token(sequence, delta, now)
        new = sequence.text.add(delta)
        self.completion_tokens += len(new.token_ids)
        if self._record is not None:
            self._record.completion_tokens += len(new.token_ids)
            self._record.last_token = now
        if new.finish_reason is not None:
            del self._sequences[delta.request_id]
            self.feed.abort(delta.request_id)  # of use only if a stop string ended it
            self._observe_end(sequence, new.finish_reason, now)
        return new

    def _observe_token(self, sequence: _Sequence, delta: Delta, now: float) -> None:
        if sequence.first_time:
            count = len(delta.token_ids)  # of which only the last one's time is known
            self._metrics.inter_token_latency.observe((now - sequence.last_time) / count, count)
        else:
            sequence.first_time, sequence.prefill_seconds = now, delta.prefill_seconds
            self.cached_tokens += delta.num_cached_tokens
            self._metrics.prompt_computed(
                len(self.prompt_of(sequence.index).token_ids), delta.num_cached_tokens
            )
            self._metrics.time_to_first_token.observe(now - self._arrived)
            self._metrics.queue_time.observe(delta.queue_seconds)
            self._metrics.prefill_time.observe(delta.prefill_seconds)
            self._record_first(delta, now)
        sequence.last_time = now

    def _record_first(self, delta: Delta, now: float) -> None:
        """A sequence's first token, into the request's record."""
        record = self._record
        if record is None:
            return
        record.cached_tokens += delta.num_cached_tokens
        if not record.first_token:
            record.first_token = now
            record.queue_seconds, record.prefill_seconds = delta.queue_seconds, delta.prefill_seconds

    def _observe_end(self, sequence: _Sequence, reason: str, now: float) -> None:
        tokens, decode = sequence.text.num_tokens, now - (sequence.first_time or now)
        self._finished(reason)
        self._metrics.e2e.observe(now - self._arrived)
        self._metrics.decode_time.observe(decode)
        self._metrics.inference_time.observe(sequence.prefill_seconds + decode)
        self._metrics.generation_tokens.observe(tokens)
        if tokens > 1:
            self._metrics.time_per_output_token.observe(decode / (tokens - 1))

    def _finished(self, reason: str) -> None:
        self._metrics.finished(reason)
        if self._record is not None:
            self._record.finish_reasons[reason] += 1

    def close(self) -> None:
        """Abort what still runs."""
        for _ in self._sequences:
            self._finished("abort")
        self._sequences.clear()
        self.feed.close()

    def usage(self) -> dict[str, object]:
        """Token counts so far, in OpenAI's shape."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }
