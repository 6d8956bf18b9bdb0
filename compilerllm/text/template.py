"""Chat templates, rendered in a sandbox and to the same text as transformers' ``apply_chat_template``."""

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from compilerllm.errors import InvalidParameter
from compilerllm.text.errors import ChatTemplateFailed, TokenizerBroken

_TAIL_MARK = "<END-OF-WHAT-IS-CONTINUED> "


def pick_template(folder: Path, configured: object) -> str | None:
    """The template's source: chat_template.jinja, or else what tokenizer_config.json says (one, or several named)."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    if isinstance(configured, list):
        named = {t["name"]: t["template"] for t in configured if isinstance(t, dict) and "name" in t}
        configured = named.get("default")
    return configured if isinstance(configured, str) else None


class _GenerationTag(jinja2.ext.Extension):
    """``{% generation %}`` marks what the assistant wrote, for training; rendering passes it through."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Namespace(jinja2.utils.Namespace):
    """``namespace()`` without underscored attributes, which reach into Python's internals."""

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise jinja2.exceptions.SecurityError(f"a template may not set {name!r} on a namespace")
        super().__setitem__(name, value)


class _Dict:
    """``dict`` for templates: a call and ``fromkeys``, without the type's other attributes."""

    def __call__(self, *items: Any, **named: Any) -> dict[Any, Any]:
        return dict(*items, **named)

    def fromkeys(self, keys: Any, value: Any = None) -> dict[Any, Any]:
        return dict.fromkeys(keys, value)


def _raise_exception(message: str) -> None:
    raise jinja2.exceptions.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals.update(
        raise_exception=_raise_exception,
        strftime_now=_strftime_now,
        namespace=_Namespace,
        dict=_Dict(),
    )
    return environment


class ChatTemplate:
    """A compiled template. ``render`` may run in any thread."""

    def __init__(self, source: str, named_tokens: dict[str, str]) -> None:
        self.source, self._named_tokens = source, named_tokens
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            line = f"line {error.lineno}: " if isinstance(error, jinja2.TemplateSyntaxError) else ""
            place = "the model's chat template (chat_template.jinja, or in tokenizer_config.json)"
            raise TokenizerBroken(place, f"{line}{error}") from error

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """The prompt's text for these messages (plain JSON data). Encode it without adding special tokens.

        ``continue_final_message`` ends the prompt inside the last message, for the model to go on with it.
        Raises ``ChatTemplateFailed`` with the template's own words if it refuses them.
        """
        if continue_final_message and add_generation_prompt:
            raise InvalidParameter(
                "continue_final_message and add_generation_prompt exclude each other: set add_generation_prompt false",
                "continue_final_message",
            )
        messages = [_with_reasoning({k: v for k, v in m.items() if v is not None}) for m in messages]
        if continue_final_message:
            last = messages[-1].get("content")
            if not isinstance(last, str):
                raise InvalidParameter("the final message has no text to continue", "continue_final_message")
            messages[-1] = {**messages[-1], "content": last + _TAIL_MARK}
        text = self._render(
            messages, {"tools": tools, "add_generation_prompt": add_generation_prompt, **variables}
        )
        return _cut_at_mark(text) if continue_final_message else text

    def _render(self, messages: list[dict[str, Any]], variables: dict[str, Any]) -> str:
        given = {**self._named_tokens, "documents": None, **variables, "messages": messages}
        try:
            return self._template.render(given)
        except jinja2.TemplateError as error:
            raise ChatTemplateFailed(error.message or type(error).__name__) from error
        except (
            TypeError,
            ValueError,
            KeyError,
            AttributeError,
            IndexError,
            RecursionError,
            OverflowError,
        ) as error:
            # A template meets data of a shape it did not expect, for example a number where it adds strings.
            raise ChatTemplateFailed(f"{type(error).__name__}: {error}") from error


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """Templates read a message's reasoning as ``reasoning_content`` or ``thinking``; clients also say ``reasoning``."""
    for name in ("reasoning_content", "thinking", "reasoning"):
        if name in message:
            return {"thinking": message[name], **message, "reasoning_content": message[name]}
    return message


def _cut_at_mark(text: str) -> str:
    at = text.rfind(_TAIL_MARK.strip())
    if at < 0:
        raise InvalidParameter("the chat template drops the final message's end", "continue_final_message")
    # A template that trims messages took the mark's own space, so it also trims what stood before the mark.
    whole = text[at : at + len(_TAIL_MARK)] == _TAIL_MARK
    return text[:at] if whole else text[:at].rstrip()
