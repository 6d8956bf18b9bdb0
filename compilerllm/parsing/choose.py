"""Which formats a model writes: named by flags, told by its chat template, or brought by a plugin."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.metadata import entry_points
from typing import Any, TypeVar

from compilerllm.errors import CompilerLLMError
from compilerllm.parsing.channels import ChannelParser
from compilerllm.parsing.formats import REASONING, TOOLS, ReasoningFormat, ToolFormat
from compilerllm.parsing.marked import MarkedParser
from compilerllm.parsing.parts import OutputParser, Tool

_F = TypeVar("_F", ReasoningFormat, ToolFormat)
AUTO, NONE = "auto", "none"
FLAGS = {"reasoning": "--reasoning-parser", "tools": "--tool-call-parser"}
PLUGINS = {"reasoning": "compilerllm.reasoning_parsers", "tools": "compilerllm.tool_parsers"}


class UnknownParser(CompilerLLMError):
    """A name that no format has, or a plugin that is none."""


@dataclass(frozen=True)
class OutputFormat:
    """How a model's outputs are marked. ``names``: of the two formats, for people; "" where there is none."""

    reasoning: ReasoningFormat | None = None
    tools: ToolFormat | None = None
    names: tuple[str, str] = ("", "")

    @property
    def special(self) -> bool:
        """Whether markers are special tokens, so that texts must show these."""
        channels = self.reasoning is not None and self.reasoning.channels
        return channels or (self.tools is not None and self.tools.special)

    def parser(
        self, prompt: str, tools: Iterable[Tool], hidden: Iterable[str], parallel: bool = True
    ) -> OutputParser:
        """What takes an output apart that continues ``prompt``. No tools: calls are text. hidden: special tokens."""
        schemas = {t.name: t.parameters for t in tools}
        most = None if parallel else 1
        if self.channels:
            return ChannelParser(tools=bool(schemas), hidden=hidden, most_calls=most)
        format_ = self.tools if schemas else None
        return MarkedParser(
            self.reasoning,
            format_,
            schemas,
            inside=self.begins_inside(prompt),
            hidden=hidden,
            most_calls=most,
        )

    @property
    def channels(self) -> bool:
        """Whether outputs are harmony's messages."""
        return any(f is not None and f.channels for f in (self.reasoning, self.tools))

    def begins_inside(self, prompt: str) -> bool:
        """Whether the prompt ends within a thought: its template began one, or leaves that to the model."""
        if self.reasoning is None or self.channels:
            return False
        start, end = self.reasoning.start, self.reasoning.end
        tail = prompt.rstrip()
        if tail.endswith(start.rstrip()):
            return True
        return self.reasoning.implied and not tail.endswith(end)


PLAIN = OutputFormat()


def choose_format(reasoning: str, tools: str, template: str) -> OutputFormat:
    """The formats called ``reasoning`` and ``tools``: a name, "auto" (what the chat template tells), or "none".

    Raises ``UnknownParser`` with the nearest name.
    """
    thoughts, reasoning_format = _choose("reasoning", reasoning, REASONING, ReasoningFormat, template)
    calls, tool_format = _choose("tools", tools, TOOLS, ToolFormat, template)
    return OutputFormat(reasoning_format, tool_format, (thoughts, calls))


def names_of(kind: str) -> list[str]:
    """What --reasoning-parser ("reasoning") or --tool-call-parser ("tools") takes."""
    own: Mapping[str, object] = REASONING if kind == "reasoning" else TOOLS
    return [AUTO, NONE, *sorted({*own, *(e.name for e in entry_points(group=PLUGINS[kind]))})]


def _choose(
    kind: str, asked: str, own: Mapping[str, _F], type_: type[_F], template: str
) -> tuple[str, _F | None]:
    if asked == NONE:
        return "", None
    if asked == AUTO:
        told = (n for n, f in own.items() if f.signs and all(s in template for s in f.signs))
        name = next(told, "")
        return name, own.get(name)
    if asked in own:
        return asked, own[asked]
    for entry in entry_points(group=PLUGINS[kind], name=asked):
        found: Any = entry.load()
        if not isinstance(found, type_):
            raise UnknownParser(
                f"{FLAGS[kind]} {asked}: the plugin {entry.value} is {found!r:.80}, but must be a {type_.__name__} of "
                "compilerllm.parsing.formats."
            )
        return asked, found
    near = get_close_matches(asked, names_of(kind), 1, 0.4)
    raise UnknownParser(
        f"{FLAGS[kind]}: there is no parser {asked!r}{f'; did you mean {near[0]}?' if near else '.'} "
        f"There are {', '.join(names_of(kind))}."
    )
