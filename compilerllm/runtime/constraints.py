"""What limits a sequence's next token beyond its probabilities: lists of tokens, forbidden words, a grammar.

Each constraint clears bits of a row [ceil(V / 32)] of uint32, in which bit t % 32 of word t // 32 says that token t may
come next. One that follows what has been sampled is told each accepted token; a sequence with such a constraint is
sampled only when the host knows all of its tokens.
"""

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Tokens
from concurrent.futures import Future
from typing import TYPE_CHECKING, Protocol

import numpy as np

from compilerllm.runtime.messages import Request
from compilerllm.sampling_params import StructuredOutput

if TYPE_CHECKING:
    import numpy.typing as npt

    Words = npt.NDArray[np.uint32]


class Constraint(Protocol):
    """One limit on one sequence."""

    @property
    def follows(self) -> bool:
        """Whether what it allows depends on the tokens sampled so far."""
        ...

    def clear(self, words: "Words") -> None:
        """Clear the bits of tokens that may not come next, in a row as wide as the vocabulary."""
        ...

    def accept(self, token: int) -> None:
        """Go on behind a sampled token."""
        ...

    @property
    def complete(self) -> bool:
        """Whether nothing may follow any more, so that the sequence ends with "stop"."""
        ...

    @property
    def broken(self) -> bool:
        """Whether a token came that it does not allow: constraints that contradict each other leave nothing else."""
        ...


class GrammarCompiler(Protocol):
    """Makes constraints of forms that outputs must have, beside the step loop, and keeps what it has made."""

    def start(self, form: StructuredOutput) -> "Future[Callable[[], Constraint]]":
        """Begin to compile. The result makes a constraint for one sequence; an ``InvalidParameter`` names what is wrong."""
        ...

    def close(self) -> None:
        """Let go of threads."""
        ...


def make_constraints(request: Request, grammar: Constraint | None = None) -> list[Constraint]:
    """All that limits a request's tokens; ``grammar`` is what was compiled for it."""
    params = request.params
    found: list[Constraint] = []
    if params.allowed_token_ids is not None:
        found.append(AllowedTokens(params.allowed_token_ids))
    if request.bad_words:
        found.append(BadWords(request.bad_words))
    if request.thinking is not None and params.thinking_token_budget is not None:
        marks = request.thinking
        found.append(
            ThinkingBudget(params.thinking_token_budget, marks.start, marks.end, thinking=marks.begun)
        )
    if grammar is not None:
        found.append(grammar)
    return found


def words_of(vocab_size: int) -> int:
    """uint32 words of a row's mask."""
    return -(-vocab_size // 32)


def full_row(vocab_size: int) -> "Words":
    """A row in which every token may come next, and none beyond the vocabulary."""
    row = np.full(words_of(vocab_size), 0xFFFFFFFF, np.uint32)
    if rest := vocab_size % 32:
        row[-1] = (1 << rest) - 1
    return row


def row_of(tokens: Tokens[int], vocab_size: int) -> "Words":
    """A row in which just these tokens may come next."""
    row = np.zeros(words_of(vocab_size), np.uint32)
    ids = np.asarray([t for t in tokens if 0 <= t < vocab_size], np.int64)
    np.bitwise_or.at(row, ids // 32, np.uint32(1) << (ids % 32).astype(np.uint32))
    return row


class AllowedTokens:
    """Only these tokens, ever."""

    follows = complete = broken = False

    def __init__(self, tokens: Tokens[int]) -> None:
        self._tokens, self._row = tokens, np.zeros(0, np.uint32)

    def clear(self, words: "Words") -> None:
        if len(self._row) != len(words):
            self._row = row_of(self._tokens, 32 * len(words))
        words &= self._row

    def accept(self, token: int) -> None:
        pass


class BadWords:
    """No output holds any of these token sequences: the last token of one is forbidden behind the others of it."""

    follows = True
    complete = broken = False

    def __init__(self, words: Tokens[Tokens[int]]) -> None:
        self._words = [tuple(word) for word in words]
        self._most = max((len(word) for word in self._words), default=1) - 1
        self._tail: list[int] = []  # of the output

    def clear(self, words: "Words") -> None:
        for word in self._words:
            *before, last = word
            if not before or self._tail[-len(before) :] == before:
                words[last // 32] &= ~np.uint32(1 << last % 32)

    def accept(self, token: int) -> None:
        if self._most:
            self._tail = [*self._tail, token][-self._most :]


class ThinkingBudget:
    """At most ``budget`` tokens of thoughts: then the tokens that end them are forced, one by one.

    A thought begins with the tokens ``start`` (or with the output, if the prompt has begun one) and ends with ``end``.
    """

    follows = True
    complete = broken = False

    def __init__(self, budget: int, start: Tokens[int], end: Tokens[int], *, thinking: bool) -> None:
        self._budget, self._start, self._end = budget, list(start), list(end)
        self._thinking = thinking
        self._spent, self._ended = 0, False
        self._tail: list[int] = []

    def clear(self, words: "Words") -> None:
        if self._thinking and self._spent >= self._budget:
            words &= row_of([self._end[self._matched()]], 32 * len(words))

    def _matched(self) -> int:
        """Tokens of the end that stand at the output's end already."""
        most = min(len(self._end) - 1, len(self._tail))
        return next((n for n in range(most, 0, -1) if self._tail[-n:] == self._end[:n]), 0)

    def accept(self, token: int) -> None:
        most = max(len(self._start), len(self._end))
        self._tail = [*self._tail, token][-most:]
        if self._thinking:
            self._spent += 1
            if self._tail[-len(self._end) :] == self._end:
                self._thinking, self._ended = False, True
        elif self._start and not self._ended and self._tail[-len(self._start) :] == self._start:
            self._thinking, self._spent, self._tail = True, 0, []


def mask_rows(limited: Mapping[int, Tokens[Constraint]], count: int, vocab_size: int) -> "Words | None":
    """Rows [count, words] with what the constraints of each leave, all ones where a row has none; None if all have none."""
    if not limited:
        return None
    rows = np.empty((count, words_of(vocab_size)), np.uint32)
    rows[:] = full_row(vocab_size)
    for index, constraints in limited.items():
        row = rows[index]
        for constraint in constraints:
            constraint.clear(row)
    return rows
