"""/v1/embeddings: texts to vectors, by a model that pools."""

from typing import Any, Literal

from fastapi import FastAPI

from compilerllm.errors import InvalidParameter
from compilerllm.ir.step import Float32
from compilerllm.runtime.messages import Pool, PoolingFacts
from compilerllm.server.pooled import (
    InputRequest,
    Work,
    add_pooled,
    encode_input,
    encoded,
    pooling_facts,
    usage,
)
from compilerllm.server.service import Service


class EmbeddingRequest(InputRequest, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /v1/embeddings."""

    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None


def check_dimensions(dimensions: int | None, facts: PoolingFacts) -> None:
    """Raises ``InvalidParameter`` for more than a vector has."""
    if dimensions is not None and not 1 <= dimensions <= facts.width:
        raise InvalidParameter(
            f"dimensions must be from 1 to {facts.width}, but is {dimensions}", "dimensions"
        )


def _plan(service: Service, asked: EmbeddingRequest) -> Work:
    check_dimensions(asked.dimensions, pooling_facts(service, ("embed",), "embed texts"))
    inputs = [encode_input(service, asked, one) for one in asked.inputs(service)]
    return Work(inputs, Pool(dimensions=asked.dimensions, activate=asked.activate()))


def _shape(service: Service, asked: EmbeddingRequest, work: Work, vectors: list[Float32]) -> dict[str, Any]:
    data = [
        {"object": "embedding", "index": i, "embedding": encoded(vector, asked.encoding_format)}
        for i, vector in enumerate(vectors)
    ]
    return {"object": "list", "model": service.model, "data": data, "usage": usage(work)}


def add_routes(app: FastAPI, service: Service) -> None:
    add_pooled(app, service, ["/v1/embeddings"], "A vector for each input.", EmbeddingRequest, _plan, _shape)
