"""The form that a request asks of its output: OpenAI's response_format, vLLM's structured_outputs and older guided_* fields."""

import json
from typing import Any

from compilerllm.errors import InvalidParameter
from compilerllm.sampling_params import StructuredOutput

MOST_CHARACTERS = 1 << 20  # of a schema, a grammar, a list of choices
_KINDS = ("json", "json_object", "regex", "choice", "grammar", "structural_tag")
_OPTIONS = ("disable_any_whitespace", "disable_additional_properties", "whitespace_pattern")
GUIDED = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}


def read_response_format(wanted: dict[str, Any] | None) -> StructuredOutput | None:
    """``{"type": "text" | "json_object" | "json_schema" | "structural_tag", ...}``. Raises ``InvalidParameter``."""
    if wanted is None:
        return None
    kind, at = wanted.get("type"), "response_format"
    if kind == "text":
        return None
    if kind == "json_object":
        return StructuredOutput(kind="json_object", param=at)
    if kind == "json_schema":
        named = wanted.get("json_schema")
        if not isinstance(named, dict) or not isinstance(named.get("schema"), dict | bool):
            raise InvalidParameter(
                'response_format.json_schema must be {"name": ..., "schema": {...}}',
                "response_format.json_schema",
            )
        return StructuredOutput(kind="json", text=_text(named["schema"], at), param=at)
    if kind == "structural_tag":
        return StructuredOutput(kind="structural_tag", text=_text(wanted, at), param=at)
    raise InvalidParameter(
        f"response_format.type must be text, json_object, json_schema or structural_tag, but is {kind!r:.80}",
        "response_format.type",
    )


def read_structured_outputs(wanted: dict[str, Any] | None) -> StructuredOutput | None:
    """vLLM's ``{"json": ...}``, ``{"regex": ...}`` and so on, one of them. Raises ``InvalidParameter`` naming the member."""
    if wanted is None:
        return None
    at = "structured_outputs"
    for name in wanted:
        if name not in (*_KINDS, *_OPTIONS):
            raise InvalidParameter(f"{at} has an unknown member {name!r:.80}", f"{at}.{name:.80}")
    if wanted.get("whitespace_pattern") is not None:
        raise InvalidParameter(
            f"{at}.whitespace_pattern is not supported; leave it out", f"{at}.whitespace_pattern"
        )
    given = [k for k in _KINDS if wanted.get(k) not in (None, False)]
    if len(given) != 1:
        raise InvalidParameter(f"{at} must have one of {', '.join(_KINDS)}, but has {len(given)}", at)
    form = _form(given[0], wanted[given[0]], at)
    return StructuredOutput(
        kind=form.kind,
        text=form.text,
        param=at,
        any_whitespace=not wanted.get("disable_any_whitespace"),
        additional_properties=not wanted.get("disable_additional_properties"),
    )


def _form(kind: str, value: Any, at: str) -> StructuredOutput:
    place = f"{at}.{kind}"
    if kind == "json_object":
        return StructuredOutput(kind="json_object", param=at)
    if kind == "json":
        return StructuredOutput(
            kind="json", text=value if isinstance(value, str) else _text(value, place), param=at
        )
    if kind == "choice":
        if not isinstance(value, list) or not value or any(not isinstance(c, str) or not c for c in value):
            raise InvalidParameter(f"{place} must be a list of non-empty texts", place)
        return StructuredOutput(kind="choice", text=_text(value, place), param=at)
    if kind == "structural_tag":
        text = value if isinstance(value, str) else _text(value, place)
        return StructuredOutput(kind="structural_tag", text=text, param=at)
    if not isinstance(value, str) or not value or len(value) > MOST_CHARACTERS:
        raise InvalidParameter(f"{place} must be a text of 1 to {MOST_CHARACTERS} characters", place)
    return StructuredOutput(kind="regex" if kind == "regex" else "grammar", text=value, param=at)


def _text(value: Any, at: str) -> str:
    text = json.dumps(value, ensure_ascii=False)
    if len(text) > MOST_CHARACTERS:
        raise InvalidParameter(f"{at} has {len(text)} characters, more than {MOST_CHARACTERS}", at)
    return text


def one_form(*found: StructuredOutput | None) -> StructuredOutput | None:
    """The form of a request, which may ask for it in one place only."""
    forms = [form for form in found if form is not None]
    if len(forms) > 1:
        raise InvalidParameter(
            f"{forms[0].param} and {forms[1].param} both say what form the output must have: leave one out",
            forms[1].param,
        )
    return forms[0] if forms else None


def schema_form(schema: dict[str, Any], param: str) -> StructuredOutput:
    """The form of JSON after a schema of ours, such as that of a tool's arguments."""
    return StructuredOutput(kind="json", text=_text(schema, param), param=param)
