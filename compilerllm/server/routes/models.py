"""/v1/models: the one model that is served."""

from typing import Any

from fastapi import FastAPI
from starlette.responses import Response

from compilerllm.server.errors import ModelNotFound
from compilerllm.server.service import Service, json_response


def add_routes(app: FastAPI, service: Service) -> None:
    async def list_models() -> Response:
        """The one model that is served."""
        return json_response({"object": "list", "data": [_describe(service)]})

    async def find_model(name: str) -> Response:
        """The served model, if it has this name."""
        if name != service.model:
            raise ModelNotFound(name, service.model)
        return json_response(_describe(service))

    app.add_api_route("/v1/models", list_models, methods=["GET"])
    app.add_api_route("/v1/models/{name:path}", find_model, methods=["GET"])


def _describe(service: Service) -> dict[str, Any]:
    return {
        "id": service.model,
        "object": "model",
        "created": service.created,
        "owned_by": "compilerllm",
        "root": service.model,
        "max_model_len": service.client.ready.max_model_len,
    }
