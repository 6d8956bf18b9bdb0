"""/openapi.json: what FastAPI finds, with the answers that are not its own: refusals, completions, streams, keys."""

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from compilerllm.server.auth import OPEN_PATHS

Schema = dict[str, Any]


def _object(**properties: Schema) -> Schema:
    """All properties are there; others may be."""
    return {"type": "object", "required": list(properties), "properties": properties}


def _list_of(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def _or_null(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


_TEXT: Schema = {"type": "string"}
_COUNT: Schema = {"type": "integer", "minimum": 0}
_REASON = {"enum": ["stop", "length", "tool_calls", "error", "abort", "repetition"]}
_HEAD = {"id": _TEXT, "created": _COUNT, "model": _TEXT}

SCHEMAS: dict[str, Schema] = {
    "Refusal": _object(
        error={
            "type": "object",
            "required": ["message", "type"],
            "properties": {
                "message": _TEXT,
                "type": _TEXT,
                "param": _or_null(_TEXT),
                "code": _or_null({"type": ["string", "integer"]}),
            },
        }
    ),
    "Usage": _object(prompt_tokens=_COUNT, completion_tokens=_COUNT, total_tokens=_COUNT),
    "ChatCompletion": _object(
        **_HEAD,
        object={"const": "chat.completion"},
        choices=_list_of(
            _object(
                index=_COUNT,
                message={
                    "type": "object",
                    "required": ["role"],
                    "properties": {
                        "role": {"const": "assistant"},
                        "content": _or_null(_TEXT),
                        "reasoning": _or_null(_TEXT),
                        "tool_calls": _list_of(_ref("ToolCall")),
                    },
                },
                finish_reason=_REASON,
            )
        ),
        usage=_ref("Usage"),
    ),
    "ToolCall": _object(id=_TEXT, type={"const": "function"}, function=_object(name=_TEXT, arguments=_TEXT)),
    "ChatCompletionChunk": _object(
        **_HEAD,
        object={"const": "chat.completion.chunk"},
        choices=_list_of(_object(index=_COUNT, delta={"type": "object"}, finish_reason=_or_null(_REASON))),
    ),
    "Completion": _object(
        **_HEAD,
        object={"const": "text_completion"},
        choices=_list_of(_object(index=_COUNT, text=_TEXT, finish_reason=_or_null(_REASON))),
    ),
    "Model": _object(id=_TEXT, object={"const": "model"}, created=_COUNT, owned_by=_TEXT),
    "Models": _object(object={"const": "list"}, data=_list_of(_ref("Model"))),
}
# (method, path) -> name of the answer's schema, and of a streamed event's.
ANSWERS: dict[tuple[str, str], tuple[str, str | None]] = {
    ("post", "/v1/chat/completions"): ("ChatCompletion", "ChatCompletionChunk"),
    ("post", "/v1/completions"): ("Completion", "Completion"),
    ("get", "/v1/models"): ("Models", None),
    ("get", "/v1/models/{name}"): ("Model", None),
}
_REFUSED = {"description": "Refused.", "content": {"application/json": {"schema": _ref("Refusal")}}}
_FAILED = {"description": "Failed.", "content": {"application/json": {"schema": _ref("Refusal")}}}


def document(app: FastAPI, guarded: bool) -> None:
    """Make the application describe itself so. ``guarded``: it has keys."""

    def describe() -> dict[str, Any]:
        if app.openapi_schema is None:
            described = get_openapi(
                title=app.title, version=app.version, routes=app.routes, servers=app.servers or None
            )
            app.openapi_schema = _complete(described, guarded)
        return app.openapi_schema

    app.openapi = describe  # type: ignore[method-assign]


def _complete(described: dict[str, Any], guarded: bool) -> dict[str, Any]:
    parts = described.setdefault("components", {})
    schemas = parts.setdefault("schemas", {})
    for name in ("HTTPValidationError", "ValidationError"):  # FastAPI's own, which are never sent
        schemas.pop(name, None)
    schemas.update(SCHEMAS)
    if guarded:
        parts["securitySchemes"] = {
            "bearer": {"type": "http", "scheme": "bearer"},
            "header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
        }
    for path, operations in described["paths"].items():
        if path in OPEN_PATHS:
            continue
        for method, operation in operations.items():
            answers = operation["responses"]
            answers.pop("422", None)
            answers.setdefault("4XX", _REFUSED)
            answers.setdefault("5XX", _FAILED)
            if guarded:
                operation["security"] = [{"bearer": []}, {"header": []}]
            if (method, path) in ANSWERS:
                answers["200"]["content"] = _content(*ANSWERS[method, path])
    return described


def _content(whole: str, event: str | None) -> dict[str, Any]:
    content: dict[str, Any] = {"application/json": {"schema": _ref(whole)}}
    if event is not None:
        note = f"Server-sent events, each with a {event} as its data; the last one's data is [DONE]."
        content["text/event-stream"] = {"schema": {"type": "string", "description": note}}
    return content
