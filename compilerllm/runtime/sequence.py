"""One request on its way through the engine: its tokens, how far they are computed, and what it holds."""

import random
from enum import Enum

from compilerllm.runtime.constraints import Constraint, make_constraints
from compilerllm.runtime.messages import Request, TokenLogprobs
from compilerllm.runtime.repetition import repeats


class Status(Enum):
    """WAITING holds nothing; RUNNING holds a slot and blocks; FINISHED holds them until no running step uses them."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class Sequence:
    """A live request.

    Positions, always: 0 <= ``computed`` <= ``scheduled`` <= ``len(tokens) + pending``.

        [0, computed)           states written by steps that are committed; tokens known
        [computed, scheduled)   in a running step, which may still write them
        [scheduled, length)     to be scheduled; the last ``pending`` tokens are known to the device only
    """

    __slots__ = (
        "arrival", "bans", "bias", "cached_tokens", "capacity", "computed", "constraints", "error", "finish_reason",
        "first_scheduled", "first_token", "follows", "hashes", "in_flight", "leaving", "limit", "new_logprobs",
        "new_tokens", "num_preemptions", "num_prompt", "order", "params", "pending", "prompt_scores", "published",
        "reported", "request", "request_id", "resync", "scheduled", "seed", "slot", "status", "step_number", "stop_ids",
        "stop_reason", "tables", "tables_changed", "tokens",
    )  # fmt: skip

    def __init__(
        self, request: Request, arrival: int, max_model_len: int, grammar: Constraint | None = None
    ) -> None:
        params = request.params
        self.request = request
        self.request_id = request.request_id
        self.params = params
        self.arrival = arrival  # order of submission
        # Who runs and stays before whom; never changes, so a preempted sequence keeps its place.
        self.order = (request.priority, arrival)
        self.tokens = list(request.prompt_token_ids)
        self.num_prompt = len(self.tokens)
        wanted = max_model_len if params.max_tokens is None else self.num_prompt + params.max_tokens
        self.limit = min(wanted, max_model_len)  # tokens, prompt and output, at which it ends with "length"
        self.seed = (random.getrandbits(64) if params.seed is None else params.seed) & (2**64 - 1)

        eos = () if params.ignore_eos else request.eos_token_ids
        self.stop_ids = frozenset(eos) | frozenset(params.stop_token_ids)
        # Banned until min_tokens are out; also what would not end it itself, but may end a grammar.
        self.bans = sorted(self.stop_ids | set(request.eos_token_ids)) if params.min_tokens else []
        self.bias = sorted(params.logit_bias.items())
        self.constraints = make_constraints(request, grammar)
        self.follows = any(c.follows for c in self.constraints)
        self.prompt_scores: list[TokenLogprobs] = []  # of the prompt's tokens from the second on

        self.status = Status.WAITING
        self.computed = 0
        self.scheduled = 0
        self.pending = 0  # sampled tokens of running steps
        self.in_flight = 0  # running steps that hold this sequence
        self.leaving = False  # preempted, but a running step still uses its blocks
        self.step_number = -1  # the step it was last scheduled in
        self.resync = False  # the device's draw count is ahead of the accepted tokens

        self.slot = -1  # owned by the pool, as are the next five
        self.tables: list[list[int]] = []  # [paged groups][blocks]: block ids in context order, -1 = freed
        self.capacity = 0  # positions the tables have room for
        self.published: list[int] = []  # [paged groups]: blocks [0, n) were offered to the prefix cache
        self.hashes: dict[int, list[bytes]] = {}  # block size -> hash of each full block, the parent's within
        self.tables_changed = False  # since the runner last copied them

        self.cached_tokens = 0  # prompt tokens found in shared blocks at the first admission
        self.num_preemptions = 0
        self.first_scheduled: float | None = None
        self.first_token: float | None = None
        self.reported = False  # a delta has gone out
        self.new_tokens: list[int] = []  # accepted, not yet sent
        self.new_logprobs: list[TokenLogprobs] = []
        self.finish_reason: str | None = None
        self.stop_reason: int | None = None
        self.error: str | None = None

    @property
    def length(self) -> int:
        """Tokens including those only the device knows."""
        return len(self.tokens) + self.pending

    @property
    def num_outputs(self) -> int:
        """Output tokens the host knows."""
        return len(self.tokens) - self.num_prompt

    def append(self, token: int) -> str | None:
        """Take one sampled token. Returns the finish reason if it ends the sequence."""
        self.tokens.append(token)
        self.new_tokens.append(token)
        for constraint in self.constraints:
            constraint.accept(token)
        if token in self.stop_ids and self.num_outputs >= self.params.min_tokens:
            if token in self.params.stop_token_ids:
                self.stop_reason = token
            return "stop"
        if self.constraints:
            if any(c.broken for c in self.constraints):
                self.error = (
                    "No token may come next: the form of the output and the request's other limits on tokens "
                    "(min_tokens, logit_bias, allowed_token_ids, bad_words) contradict each other."
                )
                return "error"
            if any(c.complete for c in self.constraints):
                return "stop"
        rule = self.params.repetition_detection
        if rule is not None and repeats(self.tokens[self.num_prompt :], rule):
            return "repetition"
        return "length" if len(self.tokens) >= self.limit else None

    def scores_to(self, start: int, end: int) -> int:
        """How many of the positions [start, end) still owe the log-probability of the prompt's token behind them."""
        if self.params.prompt_logprobs is None:
            return 0
        return max(0, min(end, self.num_prompt - 1) - max(start, len(self.prompt_scores)))

    @property
    def scored(self) -> bool:
        """Whether no token of the prompt owes its log-probability."""
        return self.params.prompt_logprobs is None or len(self.prompt_scores) >= self.num_prompt - 1

    def __repr__(self) -> str:
        return (
            f"Sequence({self.request_id!r}, {self.status.value}, tokens={len(self.tokens)}+{self.pending}, "
            f"computed={self.computed}, scheduled={self.scheduled}, in_flight={self.in_flight}, slot={self.slot})"
        )
