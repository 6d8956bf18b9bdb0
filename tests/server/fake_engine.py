"""An engine without a model: each request gets its own prompt back, token by token, again and again."""

import asyncio
import math
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

from compilerllm.errors import EngineDead
from compilerllm.runtime.admission import Limits
from compilerllm.runtime.client import Health
from compilerllm.runtime.messages import Batch, Delta, Ready, Request, Stats, TokenLogprobs


@dataclass
class FakeEngine:
    """Deterministic. ``step_seconds`` paces it; ``per_step`` tokens come at a time."""

    vocab_size: int
    max_model_len: int = 512
    max_open_requests: int | None = None
    step_seconds: float = 0.0
    per_step: int = 1
    policy: str = "fcfs"
    health: Health = "ready"
    aborted: list[str] = field(default_factory=list)
    seen: list[Request] = field(default_factory=list)
    _open: dict[str, tuple[Request, int]] = field(default_factory=dict)
    _dying: bool = False

    def __post_init__(self) -> None:
        self.ready = Ready(
            model="fake",
            target="none",
            max_model_len=self.max_model_len,
            vocab_size=self.vocab_size,
            blocks_total=64,
            block_size=32,
            max_open_requests=self.max_open_requests,
            policy=self.policy,
            card={"model": "fake"},
        )
        self._limits = Limits.of(self.ready)

    @property
    def num_open(self) -> int:
        return len(self._open)

    def submit(self, request: Request) -> None:
        if self.health != "ready":
            raise EngineDead("dead")
        self._limits.check(request, len(self._open))
        self.seen.append(request)
        self._open[request.request_id] = (request, 0)

    def abort(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            if self._open.pop(request_id, None) is not None:
                self.aborted.append(request_id)

    def die(self) -> None:
        """End as a killed engine process does: every open request fails, nothing new is taken."""
        self._dying = True

    def revive(self) -> None:
        self._dying, self.health = False, "ready"

    def close(self) -> None:
        self.health = "dead"

    async def stream(self) -> AsyncIterator[Batch | Stats]:
        while True:
            await asyncio.sleep(self.step_seconds or (0 if self._open else 0.001))
            if self._dying and self.health == "ready":
                self.health = "restarting"
                failed, self._open = list(self._open), {}
                yield Batch(
                    deltas=[
                        Delta(
                            request_id=i, token_ids=[], finish_reason="error", error="the engine process died"
                        )
                        for i in failed
                    ],
                    stats=Stats(),
                )
            elif self._open:
                yield Batch(
                    deltas=[self._advance(*state) for state in list(self._open.values())], stats=self._stats()
                )

    def _stats(self) -> Stats:
        return Stats(
            num_running=len(self._open), blocks_total=64, blocks_used=len(self._open), generation_tokens=7
        )

    def _advance(self, request: Request, done: int) -> Delta:
        params, prompt = request.params, request.prompt_token_ids
        limit = min(params.max_tokens or self.max_model_len, self.max_model_len - len(prompt))
        ends = {*params.stop_token_ids, *(() if params.ignore_eos else request.eos_token_ids)}
        tokens: list[int] = []
        finish: str | None = None
        while finish is None and len(tokens) < self.per_step:
            tokens.append(prompt[(done + len(tokens)) % len(prompt)])
            if done + len(tokens) > params.min_tokens and tokens[-1] in ends:
                finish = "stop"
            elif done + len(tokens) >= limit:
                finish = "length"
        if finish is None:
            self._open[request.request_id] = (request, done + len(tokens))
        else:
            del self._open[request.request_id]
        return Delta(
            request_id=request.request_id,
            token_ids=tokens,
            logprobs=[self._logprob(t, params.logprobs) for t in tokens]
            if params.logprobs is not None
            else None,
            finish_reason=finish,
            stop_reason=tokens[-1] if finish == "stop" and tokens[-1] in params.stop_token_ids else None,
            num_cached_tokens=3 if done == 0 else 0,
            prompt_logprobs=[self._logprob(t, params.prompt_logprobs) for t in prompt[1:]]
            if params.prompt_logprobs is not None and done == 0
            else None,
        )

    def _logprob(self, token: int, top: int) -> TokenLogprobs:
        others = [(token + i) % self.vocab_size for i in range(top)]
        return TokenLogprobs(
            chosen=-0.5,
            rank=1,
            top_ids=others,
            top=[-0.5 - i for i in range(top - 1)] + [-math.inf] * (top > 0),
        )
