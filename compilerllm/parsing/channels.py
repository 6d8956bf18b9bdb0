"""Takes harmony apart: messages, each with a header that names its channel and to whom it goes.

<|channel|>analysis<|message|>thoughts<|end|><|start|>assistant<|channel|>commentary to=functions.f<|message|>{...}<|call|>
"""

import re
from collections.abc import Iterable
from typing import Literal

from compilerllm.parsing.marked import Markers
from compilerllm.parsing.parts import CallArguments, CallStart, Content, Part, Reasoning
from compilerllm.parsing.readers import dump, json_object

_CHANNEL, _MESSAGE = "<|channel|>", "<|message|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>", _CHANNEL)
_TO = re.compile(r"to=(?:functions\.)?([\w.-]+)")
_Place = Literal["before", "header", "body"]


class ChannelParser:
    """One sequence's output. Thoughts are the channel "analysis"; what goes to a function is a call of it, if its text is
    an object; all else is the answer."""

    def __init__(self, *, tools: bool, hidden: Iterable[str] = (), most_calls: int | None = None) -> None:
        self._tools, self._most = tools, most_calls
        self._hidden = frozenset(hidden) - {_MESSAGE, *_ENDS}
        self._bounds: dict[_Place, Markers] = {
            "before": Markers((*_ENDS, *self._hidden)), "header": Markers((_MESSAGE,)),
            "body": Markers((*_ENDS, *self._hidden)),
        }  # fmt: skip
        self._place: _Place = "before"
        self._text, self._role, self._header, self._arguments = "", "", "", ""
        self._first = True  # no marker has come: what comes is the answer
        self._count = 0

    def add(self, text: str) -> list[Part]:
        self._text += text
        return self._run(final=False)

    def finish(self) -> list[Part]:
        return [*self._run(final=True), *self._end()]

    def _run(self, final: bool) -> list[Part]:
        parts: list[Part] = []
        while True:
            text, marker, self._text = self._bounds[self._place].split(self._text, final)
            parts += self._take(text)
            if not marker:
                return parts
            if marker not in self._hidden:
                parts += self._passed(marker)

    def _take(self, text: str) -> list[Part]:
        if self._place == "header":
            self._header += text
        elif self._place == "before":
            if self._first:
                return [Content(text)] if text else []
            self._role += text
        elif self._recipient is not None:
            self._arguments += text
        elif text:
            return [Reasoning(text) if self._channel == "analysis" else Content(text)]
        return []

    def _passed(self, marker: str) -> list[Part]:
        self._first = False
        if marker == _MESSAGE:
            self._place = "body"
            return []
        parts = self._end()
        self._place = "header" if marker == _CHANNEL else "before"
        if marker == "<|start|>":
            self._role = ""
        return parts

    def _end(self) -> list[Part]:
        """Of a message."""
        name, said = self._recipient if self._place == "body" else None, self._arguments
        self._arguments, self._header = "", ""
        if name is None:
            return []
        arguments = json_object(said or "{}")
        if arguments is None:
            return [Content(said)]
        if self._most is not None and self._count >= self._most:
            return []
        self._count += 1
        return [CallStart(self._count - 1, name), CallArguments(self._count - 1, dump(arguments))]

    @property
    def _channel(self) -> str:
        return self._header.split()[0] if self._header.split() else "final"

    @property
    def _recipient(self) -> str | None:
        found = _TO.search(f"{self._role} {self._header}") if self._tools else None
        return found[1] if found else None
