"""Tools in a request: which there are, and which of them the model may or must call."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from compilerllm.errors import InvalidParameter
from compilerllm.parsing.forced import NamedCall, RequiredCalls
from compilerllm.parsing.parts import OutputParser, Tool
from compilerllm.sampling_params import StructuredOutput
from compilerllm.server.formats import schema_form

_NAME_LENGTH = 64
Mode = Literal["none", "auto", "required", "named"]


@dataclass(frozen=True)
class ToolUse:
    """The tools of a request and how they are to be used: ``named`` calls the one tool that is left."""

    tools: tuple[Tool, ...] = ()
    mode: Mode = "none"
    parallel: bool = True

    def form(self) -> StructuredOutput | None:
        """What the output must look like so that it is a call, where one is required.

        Required: a list of {"name", "parameters"}; named: the arguments alone.
        """
        if self.mode == "named":
            return schema_form(self.tools[0].parameters, "tools")
        if self.mode != "required":
            return None
        calls = [
            {
                "type": "object",
                "properties": {"name": {"const": t.name}, "parameters": t.parameters},
                "required": ["name", "parameters"],
                "additionalProperties": False,
            }
            for t in self.tools
        ]
        most = {} if self.parallel else {"maxItems": 1}
        items = calls[0] if len(calls) == 1 else {"anyOf": calls}
        return schema_form({"type": "array", "minItems": 1, "items": items, **most}, "tools")

    def parser(self) -> Callable[[], OutputParser] | None:
        """What makes calls of an output that must be one. None: all of it is text, a model's own calls included."""
        if self.mode == "named":
            return partial(NamedCall, self.tools[0].name)
        return RequiredCalls if self.mode == "required" else None

    def for_template(self) -> list[dict[str, Any]] | None:
        """The tools as chat templates read them; None where the model is not to know of any."""
        if self.mode == "none":
            return None
        return [
            {
                "type": "function",
                "function": {"name": t.name, "description": t.description, "parameters": t.parameters},
            }
            for t in self.tools
        ]


def read_tools(tools: Sequence[Any], choice: Any, parallel: bool = True) -> ToolUse:
    """OpenAI's ``tools`` and ``tool_choice``. Raises ``InvalidParameter`` naming the place."""
    known = tuple(_read_tool(tool, f"tools[{i}]") for i, tool in enumerate(tools))
    names = [t.name for t in known]
    for i, name in enumerate(names):
        if name in names[:i]:
            raise InvalidParameter(
                f"tools[{i}] has the name of another tool, {name!r}", f"tools[{i}].function.name"
            )
    mode, chosen = _read_choice(choice, known)
    if mode in ("required", "named") and not known:
        raise InvalidParameter("tool_choice asks for a call, but there are no tools", "tool_choice")
    return ToolUse(chosen, mode, parallel)


def _read_tool(tool: Any, at: str) -> Tool:
    if not isinstance(tool, dict) or tool.get("type", "function") != "function":
        raise InvalidParameter(
            f'{at} must be {{"type": "function", "function": {{...}}}}; other kinds are not supported', at
        )
    function = tool.get("function")
    if not isinstance(function, dict):
        raise InvalidParameter(f"{at}.function must be an object with a name", f"{at}.function")
    name = function.get("name")
    if not isinstance(name, str) or not 0 < len(name) <= _NAME_LENGTH or not name.isprintable():
        raise InvalidParameter(
            f"{at}.function.name must be a text of 1 to {_NAME_LENGTH} characters", f"{at}.function.name"
        )
    parameters = function.get("parameters")
    if parameters is None:
        parameters = {"type": "object", "properties": {}}
    if not isinstance(parameters, dict):
        raise InvalidParameter(
            f"{at}.function.parameters must be a JSON schema, an object", f"{at}.function.parameters"
        )
    description = function.get("description")
    return Tool(
        name, description if isinstance(description, str) else "", parameters, bool(function.get("strict"))
    )


def _read_choice(choice: Any, tools: tuple[Tool, ...]) -> tuple[Mode, tuple[Tool, ...]]:
    if choice is None:
        return ("auto" if tools else "none"), tools
    if choice in ("none", "required"):
        return choice, tools
    if choice == "auto":
        return ("auto" if tools else "none"), tools
    if isinstance(choice, dict) and choice.get("type") == "function":
        function = choice.get("function", choice)  # the responses API has the name beside the type
        name = function.get("name") if isinstance(function, dict) else None
        return "named", (_find(name, tools, "tool_choice.function.name"),)
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        allowed = choice.get("allowed_tools", choice)
        listed, mode = allowed.get("tools", []), allowed.get("mode", "auto")
        names = [t.get("function", t).get("name") if isinstance(t, dict) else None for t in listed]
        if mode not in ("auto", "required"):
            raise InvalidParameter("tool_choice.mode must be auto or required", "tool_choice")
        return mode, tuple(_find(name, tools, "tool_choice") for name in names)
    raise InvalidParameter(
        'tool_choice must be "none", "auto", "required" or {"type": "function", "function": {"name": ...}}',
        "tool_choice",
    )


def _find(name: Any, tools: tuple[Tool, ...], param: str) -> Tool:
    for tool in tools:
        if tool.name == name:
            return tool
    known = ", ".join(t.name for t in tools) or "none"
    raise InvalidParameter(f"tool_choice names {name!r:.80}, but the tools are {known}", param)
