"""Takes texts with markers apart: thoughts, answers, calls. One engine for all formats of ``parsing.formats``.

Where a text might go on to be a marker, it is held back until that is decided, and blanks before a marker with it: what
becomes of a text does not depend on how it came in pieces. A block that is no call in the end stays part of the answer.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Literal

from compilerllm.parsing.formats import ReasoningFormat, ToolFormat
from compilerllm.parsing.parts import CallArguments, CallStart, Content, Part, Reasoning
from compilerllm.parsing.readers import Call

MOST_ENDS = 8  # ends of a block that may stand in texts of its arguments
_Place = Literal["thought", "answer", "block"]


class Markers:
    """Texts to look for, one of which may be coming in pieces."""

    def __init__(self, texts: Iterable[str]) -> None:
        self.texts = tuple(dict.fromkeys(t for t in texts if t))
        self._beginnings = {t[:n] for t in self.texts for n in range(1, len(t))}
        self._longest = max(map(len, self.texts), default=1) - 1

    def _find(self, text: str) -> tuple[int, str]:
        """The first of them and its place; of several there the longest. (-1, "") where there is none."""
        found = [(at, -len(t), t) for t in self.texts if (at := text.find(t)) >= 0]
        return (min(found)[0], min(found)[2]) if found else (-1, "")

    def split(self, text: str, final: bool) -> tuple[str, str, str]:
        """What is before the first marker, the marker, and the rest; without one "", and what may be the beginning of one.

        A marker that a longer one begins with is none until it is decided. ``final``: nothing more comes.
        """
        at, marker = self._find(text)
        if marker and (final or not self._grows(text[at:])):
            return text[:at], marker, text[at + len(marker) :]
        cut = at if marker else len(text) - (0 if final else self._coming(text))
        return text[:cut], "", text[cut:]

    def _grows(self, text: str) -> bool:
        """Whether all of the text may become a longer marker."""
        return text in self._beginnings

    def _coming(self, text: str) -> int:
        """Characters at the text's end that may be the beginning of one."""
        sizes = range(min(self._longest, len(text)), 0, -1)
        return next((n for n in sizes if text[-n:] in self._beginnings), 0)


class _Flow:
    """Text of one kind on its way out, without blanks at its beginning and before a marker."""

    def __init__(self, kind: type[Content] | type[Reasoning]) -> None:
        self._kind, self._held, self.begun = kind, "", False
        self._strips = False  # blanks that come next

    def add(self, text: str) -> list[Part]:
        text = self._held + text
        if self._strips:
            text = text.lstrip()
            self._strips = not text
        kept = len(text.rstrip())
        self._held = text[kept:]
        return self._give(text[:kept])

    def marker(self) -> None:
        """A marker comes: blanks around it belong to it."""
        self._held, self._strips = "", True

    def finish(self) -> list[Part]:
        held, self._held = self._held, ""
        return self._give(held)

    def _give(self, text: str) -> list[Part]:
        self.begun |= bool(text)
        return [self._kind(text)] if text else []


class MarkedParser:
    """One sequence's output."""

    def __init__(
        self,
        reasoning: ReasoningFormat | None,
        tools: ToolFormat | None,
        schemas: Mapping[str, Mapping[str, Any]] | None = None,
        *,
        inside: bool = False,
        hidden: Iterable[str] = (),
        most_calls: int | None = None,
    ) -> None:
        """schemas: the tools' parameters by name. inside: the output begins within a thought. hidden: special tokens that
        are left out wherever they stand. most_calls: later ones are left out."""
        self._reasoning, self._tools, self._schemas = reasoning, tools, schemas or {}
        self._most = most_calls
        starts = tools.starts if tools is not None else ()
        thinks = (reasoning.start, reasoning.end) if reasoning is not None else ()
        self._hidden = frozenset(hidden) - {*starts, *thinks} - ({tools.end} if tools is not None else set())
        self._thought_markers = Markers((*thinks, *self._hidden))
        self._answer_markers = Markers((*starts, *thinks, *self._hidden))
        self._thought, self._answer = _Flow(Reasoning), _Flow(Content)
        self._place: _Place = "thought" if inside else "answer"
        if inside:
            self._thought.marker()
        self._text = ""  # not decided yet
        self._start = ""  # the marker that began the block
        self._ends = 0  # of the block, at which it was no call
        self._tried = 0  # where to look for its next end
        self._count = 0  # calls

    def add(self, text: str) -> list[Part]:
        self._text += text
        return self._run(final=False)

    def finish(self) -> list[Part]:
        parts = self._run(final=True)
        return [*parts, *self._thought.finish(), *self._answer.finish()]

    def _run(self, final: bool) -> list[Part]:
        parts: list[Part] = []
        while True:
            before = self._place, len(self._text)
            match self._place:
                case "thought":
                    parts += self._in_thought(final)
                case "answer":
                    parts += self._in_answer(final)
                case "block":
                    parts += self._in_block(final)
            if (self._place, len(self._text)) == before:
                return parts

    def _in_thought(self, final: bool) -> list[Part]:
        text, marker, self._text = self._thought_markers.split(self._text, final)
        parts = self._thought.add(text)
        if marker:
            assert self._reasoning is not None
            if marker == self._reasoning.end:
                self._thought.marker()
                self._answer.marker()
                self._place = "answer"
            elif marker == self._reasoning.start:
                self._thought.marker()
        return parts

    def _in_answer(self, final: bool) -> list[Part]:
        if self._is_bare(final):
            return []
        text, marker, self._text = self._answer_markers.split(self._text, final)
        parts = self._answer.add(text)
        if not marker or marker in self._hidden:
            return parts
        if self._tools is not None and marker in self._tools.starts:
            self._begin(marker)
        elif self._reasoning is not None and marker == self._reasoning.start and not self._answer.begun:
            self._answer.marker()
            self._thought.marker()
            self._place = "thought"
        else:  # a mark of thoughts behind them is text like any other
            parts += self._answer.add(marker)
        return parts

    def _is_bare(self, final: bool) -> bool:
        """Whether the answer is one block without a marker; while that is open, too, and nothing is to be done."""
        if self._tools is None or not self._tools.bare or self._answer.begun or self._count:
            return False
        text = self._text.lstrip()
        if not text:
            return not final
        if text[0] not in self._tools.bare:
            return False
        self._begin("")
        return True

    def _begin(self, marker: str) -> None:
        self._place, self._start, self._ends, self._tried = "block", marker, 0, 0

    def _in_block(self, final: bool) -> list[Part]:
        assert self._tools is not None
        end = self._tools.end
        while end and (at := self._text.find(end, self._tried)) >= 0 and self._ends < MOST_ENDS:
            calls = self._tools.read(self._text[:at], self._schemas)
            self._tried, self._ends = at + len(end), self._ends + 1
            if calls is not None:
                self._text = self._text[self._tried :]
                return self._called(calls)
        if self._ends >= MOST_ENDS:
            return self._give_up()
        self._tried = max(self._tried, len(self._text) - len(end) + 1) if end else 0
        if not final:
            return []
        calls = self._tools.read(self._without_hidden(self._text), self._schemas)
        if calls is None:
            return self._give_up()
        self._text = ""
        return self._called(calls)

    def _without_hidden(self, text: str) -> str:
        for token in self._hidden:
            text = text.replace(token, "")
        return text

    def _called(self, calls: Iterable[Call]) -> list[Part]:
        parts: list[Part] = []
        for call in calls:
            if self._most is None or self._count < self._most:
                parts += [
                    CallStart(self._count, call.name, call.call_id),
                    CallArguments(self._count, call.arguments),
                ]
                self._count += 1
        self._answer.marker()
        self._place = "answer"
        return parts

    def _give_up(self) -> list[Part]:
        """The block is no call: what stands up to its first end is text, and the rest is looked at again."""
        assert self._tools is not None
        at = self._text.find(self._tools.end) if self._tools.end else -1
        cut = at + len(self._tools.end) if at >= 0 else len(self._text)
        text, self._text = self._start + self._text[:cut], self._text[cut:]
        self._place = "answer"
        return self._answer.add(self._without_hidden(text))
