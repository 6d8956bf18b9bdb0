"""Beam search over an engine: the likeliest continuations of a prompt, by asking for one token of every beam at a time.

Beams share their prefix's blocks in the engine, so that a step reads little more than their last tokens. Scores, and when a
search ends, are those of transformers' ``generate(num_beams=...)``.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import msgspec

from compilerllm.errors import InvalidParameter
from compilerllm.runtime.messages import Delta, Request
from compilerllm.sampling_params import MAX_LOGPROBS, SamplingParams

EarlyStopping = bool | Literal["never"]


@dataclass(frozen=True)
class BeamOptions:
    """How beams are weighed; their number is ``SamplingParams.n``.

    length_penalty: a beam's score is the sum of its log-probabilities by its length to this power. early_stopping: True
    ends once there are as many ended beams as wanted, False once the best running one scores no better than the worst
    ended one, "never" once it cannot at any length.
    """

    length_penalty: float = 1.0
    early_stopping: EarlyStopping = False


@dataclass(frozen=True)
class Beam:
    """Tokens behind the prompt, and the sum of their log-probabilities."""

    tokens: tuple[int, ...] = ()
    total: float = 0.0


class BeamSearch:
    """One prompt's search: ask the engine ``requests()`` and ``advance`` by its answers, until ``done``."""

    def __init__(self, asked: Request, options: BeamOptions) -> None:
        """``asked``: the prompt with parameters of which ``n`` is the number of beams, and ``max_tokens`` is set.

        Raises ``InvalidParameter`` for more beams than the engine tells likely tokens for.
        """
        params = asked.params
        assert params.max_tokens is not None
        self._asked, self._options = asked, options
        self._width, self._longest = params.n, params.max_tokens
        self._ends = frozenset((*params.stop_token_ids, *(() if params.ignore_eos else asked.eos_token_ids)))
        # Of each beam so many: all of the best could be its own, and as many tokens as there are may end it.
        self._top = self._width + len(self._ends)
        if self._top > MAX_LOGPROBS:
            raise InvalidParameter(
                f"n is {self._width}, but a beam search has at most {MAX_LOGPROBS - len(self._ends)} beams here",
                "n",
            )
        self._length = 0
        self._running = [Beam()]
        self._ended: list[Beam] = []  # the best first
        self.done = False

    def requests(self) -> list[Request]:
        """The next token of every running beam."""
        params = SamplingParams(max_tokens=1, temperature=0.0, logprobs=self._top, ignore_eos=True)
        asked = self._asked
        return [
            msgspec.structs.replace(
                asked,
                request_id=self._name(i),
                prompt_token_ids=[*asked.prompt_token_ids, *beam.tokens],
                params=params,
            )
            for i, beam in enumerate(self._running)
        ]

    def _name(self, beam: int) -> str:
        return f"{self._asked.request_id}-{self._length}-{beam}"

    def advance(self, answers: Mapping[str, Delta]) -> None:
        """Go on by the engine's answers, by request id."""
        found: list[Beam] = []
        for i, beam in enumerate(self._running):
            scores = answers[self._name(i)].logprobs
            assert scores, "an answer without what was asked for"
            at = scores[0]
            found += [
                Beam((*beam.tokens, token), beam.total + logprob)
                for token, logprob in zip(at.top_ids, at.top, strict=True)
            ]
        self._length += 1
        found.sort(key=lambda beam: -beam.total)
        full = self._length == self._longest
        new = [beam for beam in found[: self._width] if full or beam.tokens[-1] in self._ends]
        self._ended = sorted([*self._ended, *new], key=lambda beam: -self.score(beam))[: self._width]
        self._running = [beam for beam in found if beam.tokens[-1] not in self._ends][: self._width]
        self.done = full or not self._running or self._settled()

    def _settled(self) -> bool:
        """Whether nothing that runs is to replace what has ended."""
        options = self._options
        if len(self._ended) < self._width:
            return False
        if options.early_stopping is True:
            return True
        farthest = options.early_stopping == "never" and options.length_penalty > 0
        length = self._longest if farthest else self._length
        best = self._running[0].total / math.pow(length, options.length_penalty)
        return best <= self.score(self._ended[-1])

    def score(self, beam: Beam) -> float:
        """By which beams are compared."""
        return beam.total / math.pow(len(beam.tokens), self._options.length_penalty)

    def results(self) -> list[tuple[Beam, Delta]]:
        """The best beams that have ended, the best first, each also as if the engine had written it at once."""
        return [(beam, self._delta(i, beam)) for i, beam in enumerate(self._ended)]

    def _delta(self, number: int, beam: Beam) -> Delta:
        last = beam.tokens[-1]
        return Delta(
            request_id=f"{self._asked.request_id}-{number}",
            token_ids=list(beam.tokens),
            finish_reason="stop" if last in self._ends else "length",
            stop_reason=last if last in self._asked.params.stop_token_ids else None,
        )
