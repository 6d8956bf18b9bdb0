"""/classify and /pooling: a classifier's labels, and whatever a model that pools gives, of whole texts or of each token."""

from typing import Any, Literal

import numpy as np
from fastapi import FastAPI

from compilerllm.errors import InvalidParameter
from compilerllm.ir.step import Float32
from compilerllm.runtime.messages import Pool
from compilerllm.server.pooled import (
    InputRequest,
    Work,
    add_pooled,
    encode_input,
    encode_pair,
    encoded,
    head,
    pooling_facts,
    usage,
)
from compilerllm.server.routes.embeddings import check_dimensions
from compilerllm.server.service import Service
from compilerllm.text.pairs import Cut, Tokens

_PAIR = {"text", "text_pair"}
_TOKEN_TASKS = {"token_embed": "embed", "token_classify": "classify"}


class ClassifyRequest(InputRequest, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /classify. An input may also be {"text", "text_pair"}, as transformers' pipelines take pairs."""


class PoolingRequest(InputRequest, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /pooling. ``task``: what is wanted; each token's vector or labels if it is left out."""

    task: Literal["embed", "classify", "token_embed", "token_classify"] | None = None
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None


def _plan_classify(service: Service, asked: ClassifyRequest) -> Work:
    pooling_facts(service, ("classify",), "classify texts")
    return Work(
        [_one(service, asked, given) for given in asked.inputs(service)], Pool(activate=asked.activate())
    )


def _one(service: Service, asked: ClassifyRequest, given: Any) -> Tokens:
    if not isinstance(given, dict):
        return encode_input(service, asked, given)
    if set(given) != _PAIR or not all(isinstance(text, str) for text in given.values()):
        raise InvalidParameter('input: a pair is {"text": a text, "text_pair": a text}', "input")
    return encode_pair(service, asked, given["text"], given["text_pair"], Cut(), ("input", "input"))


def _shape_classify(
    service: Service, asked: ClassifyRequest, work: Work, rows: list[Float32]
) -> dict[str, Any]:
    labels = pooling_facts(service, ("classify",), "classify texts").labels
    data = [
        {"index": i, "label": labels[int(np.argmax(row))], "probs": row.tolist(), "num_classes": len(labels)}
        for i, row in enumerate(rows)
    ]
    return {**head(service, "classify"), "object": "list", "data": data, "usage": usage(work)}


def _plan_pooling(service: Service, asked: PoolingRequest) -> Work:
    tasks = ("embed", "classify") if asked.task is None else (_TOKEN_TASKS.get(asked.task, asked.task),)
    facts = pooling_facts(service, tasks, "pool texts" if asked.task is None else f"do the task {asked.task}")
    if facts.task == "embed":
        check_dimensions(asked.dimensions, facts)
    elif asked.dimensions is not None:
        raise InvalidParameter("dimensions are of embeddings; this model gives labels", "dimensions")
    pool = Pool(
        each_token=asked.task is None or asked.task in _TOKEN_TASKS,
        dimensions=asked.dimensions,
        activate=asked.activate(),
    )
    return Work([encode_input(service, asked, one) for one in asked.inputs(service)], pool)


def _shape_pooling(
    service: Service, asked: PoolingRequest, work: Work, results: list[Float32]
) -> dict[str, Any]:
    rows = [
        found.reshape(len(one.ids), -1) if work.pool.each_token else found
        for one, found in zip(work.inputs, results, strict=True)
    ]
    data = [
        {"object": "pooling", "index": i, "data": encoded(row, asked.encoding_format)}
        for i, row in enumerate(rows)
    ]
    return {**head(service, "pool"), "object": "list", "data": data, "usage": usage(work)}


def add_routes(app: FastAPI, service: Service) -> None:
    add_pooled(
        app,
        service,
        ["/classify"],
        "The label of each input.",
        ClassifyRequest,
        _plan_classify,
        _shape_classify,
    )
    add_pooled(
        app,
        service,
        ["/pooling"],
        "Vectors or labels of each input or token.",
        PoolingRequest,
        _plan_pooling,
        _shape_pooling,
    )
