"""What ``LLM`` returns."""

from dataclasses import dataclass, field

from compilerllm.runtime.messages import TokenLogprobs


@dataclass(frozen=True)
class Logprob:
    """Natural-log probability of one token at one position; ``rank`` 1 is the most likely."""

    logprob: float
    rank: int | None
    decoded_token: str


@dataclass
class CompletionOutput:
    """One generated sequence.

    finish_reason: "stop" (end-of-text token, stop token or stop string: ``stop_reason`` says which), "length", or
    "abort". ``logprobs`` has a {token id: Logprob} for each position: the chosen token and the most likely ones.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] | None = None
    cumulative_logprob: float | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass
class RequestOutput:
    """A prompt and its ``params.n`` outputs. ``prompt`` is None if it was given as token ids."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    num_cached_tokens: int = 0  # prompt tokens that were found in shared blocks
    finished: bool = False


def read_logprobs(token_id: int, at: TokenLogprobs, names: dict[int, str]) -> dict[int, Logprob]:
    """One position's log-probabilities; ``names`` has the text of every id in it."""
    ranked = enumerate(zip(at.top_ids, at.top, strict=True), start=1)
    found = {i: Logprob(value, rank, names[i]) for rank, (i, value) in ranked}
    return {token_id: Logprob(at.chosen, at.rank, names[token_id]), **found}
