"""The pieces that a chat model's output is made of, and what takes a text apart into them."""

from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text of the model's thoughts."""

    text: str


@dataclass(frozen=True, slots=True)
class Content:
    """Text of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A tool call begins: the ``index``-th of the message, of the function ``name``. ``call_id``: the model's own, or None."""

    index: int
    name: str
    call_id: str | None = None


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of the JSON text of a call's arguments."""

    index: int
    text: str


@dataclass(frozen=True)
class Tool:
    """A function that the model may call. ``parameters``: the JSON schema of its arguments, an object."""

    name: str
    description: str = ""
    parameters: dict[str, Any] = field(default_factory=lambda: {"type": "object", "properties": {}})
    strict: bool = False


Part: TypeAlias = Reasoning | Content | CallStart | CallArguments


class OutputParser(Protocol):
    """Takes one sequence's text apart. However the text is split over calls, the joined parts are the same."""

    def add(self, text: str) -> list[Part]:
        """What has become certain with this text."""
        ...

    def finish(self) -> list[Part]:
        """What was held back, when nothing more comes."""
        ...


class PlainParser:
    """For models without markers: all text is the answer."""

    def add(self, text: str) -> list[Part]:
        return [Content(text)] if text else []

    def finish(self) -> list[Part]:
        return []
