"""The items of a responses request and those it answers with, made into the messages that chat templates read."""

import json
from collections.abc import Iterable
from typing import Any

from compilerllm.errors import InvalidParameter
from compilerllm.server.blocks import Block

_ROLES = ("user", "assistant", "system", "developer")
_TEXTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
Message = dict[str, Any]


def read_items(given: str | list[Any]) -> list[Message]:
    """``input`` as messages in OpenAI's chat shape. Raises ``InvalidParameter`` naming the item."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if not given:
        raise InvalidParameter("input is an empty list: give at least one item", "input")
    return merge_turns(_read_item(item, f"input[{i}]") for i, item in enumerate(given))


def check_calls(messages: list[Message]) -> None:
    """Every tool's output must answer a call of the conversation. Raises ``InvalidParameter`` naming ``input``."""
    called: set[str] = set()
    for message in messages:
        called |= {call["id"] for call in message.get("tool_calls", ())}
        if message["role"] == "tool" and message["tool_call_id"] not in called:
            raise InvalidParameter(
                f"input has the output of a call {message['tool_call_id']!r:.80}, but no such call before it",
                "input",
            )


def instruct(instructions: str | None, messages: list[Message]) -> list[Message]:
    """The messages behind their instructions. System messages at the start become one: templates take no more."""
    head = [instructions] if instructions is not None else []
    rest = list(messages)
    while rest and rest[0]["role"] == "system":
        head.append(rest.pop(0)["content"])
    return [{"role": "system", "content": "\n\n".join(head)}, *rest] if head else rest


def answer_message(blocks: list[Block]) -> Message:
    """What the model wrote, as a message of the conversation."""
    message: Message = {"role": "assistant", "content": "".join(b.text for b in blocks if b.kind == "text")}
    if thoughts := "".join(b.text for b in blocks if b.kind == "reasoning"):
        message["reasoning"] = thoughts
    if calls := [_call(b.call_id, b.name, b.text) for b in blocks if b.kind == "call"]:
        message["tool_calls"] = calls
    return message


def merge_turns(messages: Iterable[Message]) -> list[Message]:
    """Thoughts, text and calls of one turn are items of their own, but one message of an assistant."""
    merged: list[Message] = []
    for message in messages:
        last = merged[-1] if merged else None
        if last is None or last["role"] != "assistant" or message["role"] != "assistant":
            merged.append(message)
            continue
        for name, value in message.items():
            if name == "content" or name == "reasoning":
                last[name] = "\n".join(filter(None, (last.get(name, ""), value)))
            elif name == "tool_calls":
                last[name] = [*last.get(name, []), *value]
    return merged


def _read_item(item: Any, at: str) -> Message:
    if not isinstance(item, dict):
        raise InvalidParameter(f"{at} must be an object, but is {item!r:.80}", at)
    kind = item.get("type", "message")
    if kind == "message":
        return _read_message(item, at)
    if kind == "function_call":
        return _read_call(item, at)
    if kind == "function_call_output":
        return _read_output(item, at)
    if kind == "reasoning":
        return _read_reasoning(item, at)
    raise InvalidParameter(
        f"{at}.type must be message, function_call, function_call_output or reasoning; {kind!r:.80} is not supported",
        f"{at}.type",
    )


def _read_message(item: Message, at: str) -> Message:
    _check_fields(item, {"type", "role", "content", "id", "status", "phase"}, at)
    role = item.get("role")
    if role not in _ROLES:
        raise InvalidParameter(
            f"{at}.role must be one of {', '.join(_ROLES)}, but is {role!r:.80}", f"{at}.role"
        )
    return {"role": role, "content": _read_text(item.get("content"), f"{at}.content")}


def _read_call(item: Message, at: str) -> Message:
    _check_fields(item, {"type", "call_id", "name", "arguments", "id", "status"}, at)
    arguments = _text_of(item, "arguments", at)
    try:
        parsed = json.loads(arguments or "{}")
    except (ValueError, RecursionError) as error:
        raise InvalidParameter(f"{at}.arguments is no valid JSON: {error}", f"{at}.arguments") from error
    if not isinstance(parsed, dict):
        raise InvalidParameter(f"{at}.arguments must be a JSON object's text", f"{at}.arguments")
    call = _call(_text_of(item, "call_id", at), _text_of(item, "name", at), arguments or "{}")
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def _read_output(item: Message, at: str) -> Message:
    _check_fields(item, {"type", "call_id", "output", "id", "status", "name"}, at)
    content = _read_text(item.get("output"), f"{at}.output")
    return {"role": "tool", "tool_call_id": _text_of(item, "call_id", at), "content": content}


def _read_reasoning(item: Message, at: str) -> Message:
    """The thoughts themselves, or else their summary."""
    _check_fields(item, {"type", "id", "summary", "content", "status"}, at)
    texts = []
    for name, kind in (("content", "reasoning_text"), ("summary", "summary_text")):
        parts = item.get(name) or []
        for i, part in enumerate(parts if isinstance(parts, list) else [None]):
            place = f"{at}.{name}[{i}]"
            if (
                not isinstance(part, dict)
                or part.get("type") != kind
                or not isinstance(part.get("text"), str)
            ):
                raise InvalidParameter(f'{place} must be {{"type": "{kind}", "text": ...}}', place)
            texts.append(part["text"])
        if texts:
            break
    return {"role": "assistant", "content": "", "reasoning": "\n".join(texts)}


def _read_text(content: Any, at: str) -> str:
    """A text, or the texts of parts joined by newlines."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidParameter(f"{at} must be a text or a list of parts, but is {content!r:.80}", at)
    texts = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get(_TEXTS[kind]) if isinstance(kind, str) and kind in _TEXTS else None
        if not isinstance(text, str):
            raise InvalidParameter(
                f'{at}[{i}] must be {{"type": "input_text", "text": ...}}; images, files and audio are not supported',
                f"{at}[{i}]",
            )
        texts.append(text)
    return "\n".join(texts)


def _check_fields(item: Message, known: set[str], at: str) -> None:
    for name, value in item.items():
        if name not in known and value not in (None, [], {}):
            raise InvalidParameter(f"{at}.{name:.80} is not supported", f"{at}.{name:.80}")


def _text_of(item: Message, name: str, at: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise InvalidParameter(f"{at}.{name} must be a text", f"{at}.{name}")
    return value


def _call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
