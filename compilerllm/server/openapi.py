"""/openapi.json: what FastAPI finds, with the answers that are not its own: refusals, completions, streams, keys."""

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from compilerllm.server.answers import ANSWERS, ENDED_BY_DONE, SCHEMAS, ref
from compilerllm.server.auth import OPEN_PATHS
from compilerllm.server.errors import speaks_anthropic


def _refusal(description: str, name: str) -> dict[str, Any]:
    return {"description": description, "content": {"application/json": {"schema": ref(name)}}}


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
            refusal = "MessageRefusal" if speaks_anthropic(path) else "Refusal"
            answers.setdefault("4XX", _refusal("Refused.", refusal))
            answers.setdefault("5XX", _refusal("Failed.", refusal))
            if guarded:
                operation["security"] = [{"bearer": []}, {"header": []}]
            if (method, path) in ANSWERS:
                answers["200"]["content"] = _content(*ANSWERS[method, path])
    return described


def _content(whole: str, event: str | None) -> dict[str, Any]:
    content: dict[str, Any] = {"application/json": {"schema": ref(whole)}}
    if event is not None:
        end = "; the last one's data is [DONE]." if event in ENDED_BY_DONE else "."
        note = f"Server-sent events, each with a {event} as its data{end}"
        content["text/event-stream"] = {"schema": {"type": "string", "description": note}}
    return content
