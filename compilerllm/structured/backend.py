"""What a grammar library is to us: it compiles a form once, and makes matchers of it, one a sequence."""

from typing import TYPE_CHECKING, Protocol

import numpy as np

from compilerllm.errors import InvalidParameter
from compilerllm.sampling_params import StructuredOutput

if TYPE_CHECKING:
    from compilerllm.runtime.constraints import Words


class InvalidForm(InvalidParameter):
    """A form that cannot be made: it is malformed, too large, or uses what no backend has."""


class Matcher(Protocol):
    """Where one sequence stands in its grammar."""

    def fill(self, row: "Words") -> None:
        """Write which tokens may come next, over whatever ``row`` holds."""
        ...

    def accept(self, token: int) -> bool:
        """Go on behind a token; False if it may not stand here."""
        ...

    @property
    def ended(self) -> bool:
        """Whether an end of text has been accepted."""
        ...

    @property
    def whole(self) -> bool:
        """Whether the output may end here."""
        ...


class Compiled(Protocol):
    """A form, compiled. ``nbytes``: roughly what it keeps in memory."""

    @property
    def nbytes(self) -> int: ...

    def matcher(self) -> Matcher: ...


class Backend(Protocol):
    """A grammar library over one vocabulary."""

    name: str

    def compile(self, form: StructuredOutput) -> Compiled:
        """Raises ``InvalidForm``. May take long, and releases the GIL for most of it."""
        ...


class Grammar:
    """A matcher as the ``Constraint`` of a sequence."""

    follows = True

    def __init__(self, matcher: Matcher, may_end: bool) -> None:
        """``may_end``: the model has tokens that end a text, so that it says itself when it is done."""
        self._matcher, self._may_end = matcher, may_end
        self.broken = False  # a token came that may not: another constraint left nothing else
        self.complete = self._is_complete()

    def clear(self, words: "Words") -> None:
        row = np.empty_like(words)
        self._matcher.fill(row)
        words &= row

    def accept(self, token: int) -> None:
        if not self.complete:
            self.broken = not self._matcher.accept(token)
            self.complete = self._is_complete()

    def _is_complete(self) -> bool:
        return self._matcher.ended or (not self._may_end and self._matcher.whole)
