"""A parser of a simple markup, in place of a model's own: <t>thought</t>answer<c name>arguments</c>."""

import re

import pytest

from compilerllm.parsing.parts import CallArguments, CallStart, Content, Part, Reasoning
from compilerllm.server import chat

MARKED = '<t>hmm, été</t>I look.<c look>{"at": "sea"}</c><c look>{"at": "sky"}</c>'
_MARK = re.compile(r"<(/?)([tc])(?: (\w+))?>")


class MarkupParser:
    def __init__(self, prompt: str = "") -> None:
        self._held, self._within, self._calls = "", "", 0

    def add(self, text: str) -> list[Part]:
        self._held += text
        parts: list[Part] = []
        while found := _MARK.search(self._held):
            parts += self._text(self._held[: found.start()])
            self._held = self._held[found.end() :]
            self._within = "" if found[1] else found[2]
            if self._within == "c":
                parts.append(CallStart(self._calls, found[3]))
                self._calls += 1
        if "<" not in self._held:
            parts += self._text(self._held)
            self._held = ""
        return parts

    def finish(self) -> list[Part]:
        return self._text(self._held)

    def _text(self, text: str) -> list[Part]:
        if not text:
            return []
        if self._within == "t":
            return [Reasoning(text)]
        return [CallArguments(self._calls - 1, text)] if self._within == "c" else [Content(text)]


def use_markup(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give every turn this parser."""
    made = chat.ChatAsk.__init__

    def init(self: chat.ChatAsk, *arguments: object, **named: object) -> None:
        made(self, *arguments, **{**named, "parser": MarkupParser})  # type: ignore[arg-type]

    monkeypatch.setattr(chat.ChatAsk, "__init__", init)
