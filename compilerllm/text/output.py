"""One sequence's output: tokens in, text out, ended by the engine or by a stop string."""

from dataclasses import dataclass

from compilerllm.runtime.messages import Delta, TokenLogprobs
from compilerllm.sampling_params import SamplingParams
from compilerllm.text.stops import StopMatcher, StopStrings
from compilerllm.text.tokenizer import Tokenizer


@dataclass(slots=True)
class TextDelta:
    """What a step added to a sequence, as its reader sees it. ``token_ids`` ends where a stop string did."""

    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None
    finish_reason: str | None
    stop_reason: int | str | None = None


class SequenceText:
    """Detokenizes one sequence and watches its stop strings.

    ``add`` takes the engine's deltas in order. If it returns a finish reason while the delta had none, a stop string
    was found and the caller aborts the request; deltas that still come are to be dropped.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        params: SamplingParams,
        prompt: list[int],
        eos_token_ids: tuple[int, ...],
        stops: StopStrings | None,
    ) -> None:
        self._tokens_only = not params.detokenize
        self._detokenizer = tokenizer.detokenizer(params.skip_special_tokens, prompt)
        self._include = params.include_stop_str_in_output
        self._stops = StopMatcher(stops, self._include) if stops is not None else None
        self._unwatched = params.min_tokens  # tokens before which stop strings do not count
        self._end_ids = frozenset((*params.stop_token_ids, *(() if params.ignore_eos else eos_token_ids)))
        self.num_tokens = 0

    def add(self, delta: Delta) -> TextDelta:
        token_ids = delta.token_ids
        if self._tokens_only:
            self.num_tokens += len(token_ids)
            return TextDelta("", token_ids, delta.logprobs, delta.finish_reason, delta.stop_reason)
        shown = len(token_ids)
        if (
            delta.finish_reason == "stop"
            and not self._include
            and token_ids
            and token_ids[-1] in self._end_ids
        ):
            shown -= 1  # the token that ended the sequence is reported, but is no part of its text
        text = ""
        for i in range(shown):
            self.num_tokens += 1
            new = self._detokenizer.add(token_ids[i])
            if self._stops is not None and self.num_tokens > self._unwatched:
                new = self._stops.add(new)
                if self._stops.matched is not None:
                    kept = None if delta.logprobs is None else delta.logprobs[: i + 1]
                    return TextDelta(text + new, token_ids[: i + 1], kept, "stop", self._stops.matched)
            text += new
        self.num_tokens += len(token_ids) - shown
        if delta.finish_reason is None:
            return TextDelta(text, token_ids, delta.logprobs, None)
        return self._finish(text, delta)

    def _finish(self, text: str, delta: Delta) -> TextDelta:
        rest = self._detokenizer.finish()
        if self._stops is not None:
            rest = self._stops.add(rest)
            if self._stops.matched is not None:
                return TextDelta(text + rest, delta.token_ids, delta.logprobs, "stop", self._stops.matched)
            rest += self._stops.finish()
        return TextDelta(text + rest, delta.token_ids, delta.logprobs, delta.finish_reason, delta.stop_reason)


def compile_stops(params: SamplingParams) -> StopStrings | None:
    """The request's stop strings, ready to be shared by its sequences."""
    return StopStrings(params.stop) if params.stop else None
