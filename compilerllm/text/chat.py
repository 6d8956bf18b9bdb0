"""Chat messages as clients send them, made into what templates read."""

import json
from typing import Any

from compilerllm.errors import InvalidParameter
from compilerllm.text.errors import ChatTemplateMissing, TokenizerBroken
from compilerllm.text.template import ChatTemplate
from compilerllm.text.tokenizer import Tokenizer

_ROLES = ("system", "developer", "user", "assistant", "tool")
_FIELDS = frozenset(
    {"role", "content", "name", "refusal", "reasoning", "reasoning_content", "tool_calls", "tool_call_id"}
)


def read_messages(messages: object) -> list[dict[str, Any]]:
    """Check messages and flatten their text parts (joined by newlines). Raises ``InvalidParameter`` naming the place."""
    if not isinstance(messages, list) or not messages:
        raise InvalidParameter("messages must be a non-empty list of {role, content} objects", "messages")
    return [_read_message(m, f"messages[{i}]") for i, m in enumerate(messages)]


def _read_message(message: object, at: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise InvalidParameter(f"{at} must be an object with role and content, but is {message!r:.80}", at)
    role = message.get("role")
    if role not in _ROLES:
        raise InvalidParameter(
            f"{at}.role must be one of {', '.join(_ROLES)}, but is {role!r:.80}", f"{at}.role"
        )
    for name, value in message.items():
        if name not in _FIELDS and value not in (None, []):
            raise InvalidParameter(f"{at}.{name} is not supported yet", f"{at}.{name}")
    kept = {name: value for name, value in message.items() if name in _FIELDS and value is not None}
    if calls := kept.pop("tool_calls", None):
        if role != "assistant":
            raise InvalidParameter(f"{at}.tool_calls: only an assistant calls tools", f"{at}.tool_calls")
        kept["tool_calls"] = _read_calls(calls, f"{at}.tool_calls")
        if kept.get("content") is None:
            return {**kept, "content": ""}
    return {**kept, "content": _read_content(message.get("content"), f"{at}.content")}


def _read_calls(calls: object, at: str) -> list[dict[str, Any]]:
    """Tool calls of a message, their arguments as objects, which is what templates read."""
    if not isinstance(calls, list):
        raise InvalidParameter(f"{at} must be a list of calls", at)
    read = []
    for i, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise InvalidParameter(
                f'{at}[{i}] must be {{"id": ..., "function": {{"name": ..., "arguments": ...}}}}',
                f"{at}[{i}]",
            )
        arguments = function.get("arguments") or {}
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except ValueError as error:
                place = f"{at}[{i}].function.arguments"
                raise InvalidParameter(f"{place} is no valid JSON: {error}", place) from error
        named = {"name": function["name"], "arguments": arguments}
        read.append({**({"id": call["id"]} if call.get("id") else {}), "type": "function", "function": named})
    return read


def _read_content(content: object, at: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise InvalidParameter(f"{at} must be a text or a list of text parts, but is {content!r:.80}", at)
    texts = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            raise InvalidParameter(
                f'{at}[{i}] must be {{"type": "text", "text": ...}}; other kinds of content are not supported yet',
                f"{at}[{i}]",
            )
        texts.append(part["text"])
    return "\n".join(texts)


def render_chat(
    tokenizer: Tokenizer, model: str, messages: object, source: str | None = None, **options: Any
) -> str:
    """The prompt's text of a chat; ``options`` are those of ``ChatTemplate.render``, ``source`` another template's text."""
    template = tokenizer.chat_template
    if source is not None:
        try:
            template = ChatTemplate(source, tokenizer.named_tokens)
        except TokenizerBroken as error:
            raise InvalidParameter(f"chat_template: {error.reason}", "chat_template") from error
    if template is None:
        raise ChatTemplateMissing(model)
    return template.render(read_messages(messages), **options)
