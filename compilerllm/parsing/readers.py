"""What models write between the markers of a tool call, made into calls: JSON, Python calls, XML-like parameters, tags.

A reader takes a block's text and the tools' parameters, and gives the calls in it, or None where it is no whole block.
"""

import ast
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Schemas = Mapping[str, Mapping[str, Any]]  # of the tools' parameters, by name


@dataclass(frozen=True)
class Call:
    """A call. ``arguments``: the text of a JSON object. ``call_id``: the model's own, or None."""

    name: str
    arguments: str
    call_id: str | None = None


Reader = Callable[[str, Schemas], Sequence[Call] | None]


class _NotFinite(ValueError):
    """NaN and its like, which JSON does not have."""


def _refuse(name: str) -> Any:
    raise _NotFinite(name)


_decoder = json.JSONDecoder(parse_constant=_refuse)


def _load(text: str) -> Any:
    """A JSON value and nothing behind it. Raises ``ValueError``."""
    text = text.strip()
    value, end = _decoder.raw_decode(text)
    if end < len(text):
        raise ValueError("more than one value")
    return value


def dump(arguments: Any) -> str:
    """The text of a call's arguments."""
    return json.dumps(arguments, ensure_ascii=False)


def _call(value: Any) -> Call | None:
    """A call of {"name", "arguments" or "parameters"}; arguments may be the text of an object."""
    if not isinstance(value, dict):
        return None
    function = value.get("function")
    value = function if isinstance(function, dict) else value
    name, arguments = value.get("name"), value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        try:
            arguments = _load(arguments)
        except (ValueError, RecursionError):
            return None
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        return None
    return Call(name, dump(arguments))


def json_calls(text: str, schemas: Schemas) -> list[Call] | None:
    """One object, a list of them, or several with ; or blanks between: {"name": ..., "arguments": {...}}."""
    text, values = text.strip(), []
    try:
        while text:
            value, end = _decoder.raw_decode(text)
            values += value if isinstance(value, list) else [value]
            text = text[end:].lstrip().removeprefix(";").lstrip()
    except (ValueError, RecursionError):
        return None
    calls = [call for value in values if (call := _call(value))]
    return calls if calls and len(calls) == len(values) else None


def fenced_json_calls(text: str, schemas: Schemas) -> list[Call] | None:
    """``json_calls``, in a code fence or not."""
    fence = re.fullmatch(r"\s*```(?:json)?\s*(.*?)```\s*", text, re.S)
    return json_calls(fence[1] if fence else text, schemas)


_MISTRAL = re.compile(r"(?P<name>[\w.-]+)(?:\[CALL_ID\](?P<id>[\w-]+))?(?:\[ARGS\])?\s*(?=\{)")


def mistral_calls(text: str, schemas: Schemas) -> list[Call] | None:
    """A list of {"name", "arguments"}; or name[CALL_ID]id[ARGS]{...}, each behind a marker of its own."""
    if text.lstrip().startswith("["):
        return json_calls(text, schemas)
    calls = []
    for part in text.split("[TOOL_CALLS]"):
        head = _MISTRAL.match(part.strip())
        arguments = json_object(part.strip()[head.end() :]) if head else None
        if head is None or arguments is None:
            return None
        calls.append(Call(head["name"], dump(arguments), head["id"]))
    return calls


def json_object(text: str) -> dict[str, Any] | None:
    """The JSON object that the text is; None where it is none."""
    try:
        value = _load(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def pattern_calls(pattern: str) -> Reader:
    """A reader of calls that look like ``pattern``, with groups "name", "arguments" (JSON) and perhaps "id", and nothing
    but blanks between them."""
    compiled = re.compile(pattern, re.S)

    def read(text: str, schemas: Schemas) -> list[Call] | None:
        calls, at = [], 0
        for found in compiled.finditer(text):
            arguments = json_object(found["arguments"] or "{}")
            if arguments is None or text[at : found.start()].strip():
                return None
            own = found.groupdict().get("id")
            name = found["name"].strip()
            calls.append(Call(name, dump(arguments), own.strip() if own else None))
            at = found.end()
        return calls if calls and not text[at:].strip() else None

    return read


def python_calls(text: str, schemas: Schemas) -> list[Call] | None:
    """[f(a=1), g(b="x")], or the calls without brackets: arguments are literals, by name."""
    text = text.strip()
    try:
        tree = ast.parse(text if text.startswith("[") else f"[{text}]", mode="eval").body
        nodes = tree.elts if isinstance(tree, ast.List) else []
        calls = [_python_call(node) for node in nodes]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    return calls or None


def _python_call(node: ast.expr) -> Call:
    """Raises ``ValueError`` for anything else."""
    if not isinstance(node, ast.Call) or node.args:
        raise ValueError("no call by names")
    arguments = {k.arg: _literal(k.value) for k in node.keywords}
    if None in arguments:
        raise ValueError("** is no argument")
    return Call(ast.unparse(node.func), dump(arguments))


def _literal(node: ast.expr) -> Any:
    """Python's literals, and JSON's true, false and null."""
    if isinstance(node, ast.Name) and node.id in ("true", "false", "null"):
        return {"true": True, "false": False, "null": None}[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [_literal(x) for x in node.elts]
    if isinstance(node, ast.Dict):
        keys = [ast.literal_eval(k) for k in node.keys if k is not None]
        if len(keys) != len(node.values) or not all(isinstance(k, str) for k in keys):
            raise ValueError("keys must be texts")
        return dict(zip(keys, map(_literal, node.values), strict=True))
    value = ast.literal_eval(node)
    if not isinstance(value, str | int | float | bool | None) or value != value or value in (1e999, -1e999):
        raise ValueError("JSON has no such value")
    return value


def typed(text: str, name: str, schema: Mapping[str, Any]) -> Any:
    """A parameter's text as its schema has it: a text as it is, anything else as JSON if it is any."""
    properties = schema.get("properties")
    own = properties.get(name) if isinstance(properties, Mapping) else None
    kinds = own.get("type", ()) if isinstance(own, Mapping) else "string"
    kinds = (kinds,) if isinstance(kinds, str) else kinds
    if "string" in kinds and not (text == "null" and "null" in kinds):
        return text
    try:
        return _load(text)
    except (ValueError, RecursionError):
        return {"True": True, "False": False, "None": None}.get(text.strip(), text)


_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*?)</function>\s*", re.S)
_PARAMETER = re.compile(r"\s*<parameter=([^>\n]+)>(.*?)</parameter>\s*", re.S)


def xml_calls(text: str, schemas: Schemas) -> list[Call] | None:
    """<function=name> with <parameter=key>value</parameter> in it; a value's first and last line break are markup."""
    return _nested(text, _FUNCTION, _PARAMETER, schemas)


_TAGGED = re.compile(r"\s*([^<\s]+)\s*((?:<arg_key>.*)?)\s*", re.S)
_TAGS = re.compile(r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>\s*", re.S)


def tagged_calls(text: str, schemas: Schemas) -> list[Call] | None:
    """A name, then <arg_key>key</arg_key> and <arg_value>value</arg_value> by turns."""
    return _nested(text, _TAGGED, _TAGS, schemas)


_ESCAPED = re.compile(r"\s*call:([\w.-]+)\{(.*)\}\s*", re.S)


def escaped_calls(text: str, schemas: Schemas) -> list[Call] | None:
    """call:name{key:<escape>text<escape>,other:3}."""
    found = _ESCAPED.fullmatch(text)
    if found is None:
        return None
    texts = found[2].split("<escape>")
    if len(texts) % 2 == 0:
        return None
    arguments = json_object(_quote_keys(texts))
    return None if arguments is None else [Call(found[1], dump(arguments))]


def _quote_keys(texts: Sequence[str]) -> str:
    """The text between escapes with its keys in quotes, the texts themselves as JSON."""
    bare = [re.sub(r"(^|[{,])\s*([\w-]+)\s*:", r'\1"\2":', part) for part in texts[::2]]
    parts = [part for pair in zip(bare, [*map(json.dumps, texts[1::2]), ""], strict=True) for part in pair]
    return "{" + "".join(parts) + "}"


def _nested(text: str, outer: re.Pattern[str], inner: re.Pattern[str], schemas: Schemas) -> list[Call] | None:
    """Calls of a name and a body, the body one of keys and values, both without anything else between them."""
    calls, at = [], 0
    while at < len(text):
        found = outer.match(text, at)
        if found is None or found.end() == at:
            return None
        name, body, place, arguments = found[1].strip(), found[2], 0, dict[str, Any]()
        while place < len(body) and body[place:].strip():
            pair = inner.match(body, place)
            if pair is None:
                return None
            key, value = pair[1].strip(), pair[2].removeprefix("\n").removesuffix("\n")
            arguments[key], place = typed(value, key, schemas.get(name, {})), pair.end()
        calls.append(Call(name, dump(arguments)))
        at = found.end()
    return calls or None
