"""Routes for whoever runs the server: health, readiness, version, load, metrics. They need no key."""

from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import FastAPI
from starlette.responses import Response

from compilerllm import __version__
from compilerllm.server.metrics import CONTENT_TYPE
from compilerllm.server.service import Service, json_response

_UNAVAILABLE: dict[int | str, dict[str, Any]] = {
    503: {"description": "The engine is down or restarting, or the server drains."}
}


def add_routes(app: FastAPI, service: Service) -> None:
    async def ready() -> Response:
        """200 while requests are taken; 503 while the engine is down or restarting, and while the server drains."""
        return Response(status_code=200 if service.streams.alive and not service.gate.draining else 503)

    async def live() -> Response:
        """200 while the process need not be restarted: also while it drains, or restarts its engine."""
        return Response(status_code=503 if service.client.health == "dead" else 200)

    async def version() -> Response:
        """The version of compilerllm."""
        return json_response({"version": __version__})

    async def load() -> Response:
        """How many requests are being answered."""
        return json_response({"server_load": service.gate.num_open})

    async def metrics() -> Response:
        """Prometheus metrics."""
        return Response(service.metrics.text(), media_type=CONTENT_TYPE)

    def add(path: str, answer: Callable[[], Awaitable[Response]], **described: Any) -> None:
        app.add_api_route(path, answer, methods=["GET"], response_class=Response, **described)
        app.add_api_route(path, answer, methods=["HEAD"], include_in_schema=False)

    for path in ("/health", "/ping", "/ready", "/readyz"):
        add(path, ready, responses={200: {"description": "Requests are taken."}, **_UNAVAILABLE})
    app.add_api_route("/ping", ready, methods=["POST"], response_class=Response, responses=_UNAVAILABLE)
    for path in ("/live", "/livez"):
        add(path, live, responses={503: {"description": "The engine is down for good."}})
    add("/version", version, responses=_json("version", "string"))
    add("/load", load, responses=_json("server_load", "integer"))
    text = {"text/plain": {"schema": {"type": "string"}}}
    add("/metrics", metrics, responses={200: {"description": "The exposition format.", "content": text}})


def _json(name: str, kind: str) -> dict[int | str, dict[str, Any]]:
    """The description of an answer that is an object with one field."""
    schema = {"type": "object", "required": [name], "properties": {name: {"type": kind}}}
    return {200: {"description": "OK", "content": {"application/json": {"schema": schema}}}}
