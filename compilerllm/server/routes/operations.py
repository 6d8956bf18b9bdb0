"""Routes for whoever runs the server: health, version, metrics."""

from fastapi import FastAPI
from starlette.responses import Response

from compilerllm import __version__
from compilerllm.server.metrics import CONTENT_TYPE
from compilerllm.server.service import Service, json_response


def add_routes(app: FastAPI, service: Service) -> None:
    async def health() -> Response:
        """200 while requests can be served, 503 while the engine is down."""
        return Response(status_code=200 if service.streams.alive else 503)

    async def version() -> Response:
        """The version of compilerllm."""
        return json_response({"version": __version__})

    async def metrics() -> Response:
        """Prometheus metrics."""
        return Response(service.metrics.text(), media_type=CONTENT_TYPE)

    app.add_api_route("/health", health, methods=["GET"])
    app.add_api_route("/version", version, methods=["GET"])
    app.add_api_route("/metrics", metrics, methods=["GET"])
