"""/v1/embeddings: texts to vectors, by a model that pools."""

import asyncio
import base64
import time
import uuid
from typing import Any, Literal

import msgspec
import numpy as np
from fastapi import FastAPI, Request
from starlette.responses import Response

from compilerllm.errors import ContextLengthExceeded, GenerationFailed, InvalidParameter
from compilerllm.runtime.messages import Pool
from compilerllm.runtime.messages import Request as EngineRequest
from compilerllm.sampling_params import SamplingParams
from compilerllm.server.protocol import read_request
from compilerllm.server.service import Service, body_schema, json_response, read_body
from compilerllm.server.streams import watch_disconnect
from compilerllm.text.prompts import Prompt, Truncation, encode_prompt

MOST_INPUTS = 2048  # of one request, as OpenAI's API has it
_HARMLESS = frozenset({"user", "safety_identifier", "request_id"})


class EmbeddingRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /v1/embeddings. ``input``: a text, token ids, or a list of either."""

    input: str | list[Any]
    model: str | None = None
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] = "right"
    add_special_tokens: bool = True
    priority: int = 0

    def inputs(self) -> list[Any]:
        """The inputs one by one."""
        if isinstance(self.input, str):
            return [self.input]
        if not self.input or len(self.input) > MOST_INPUTS:
            raise InvalidParameter(f"input must be a text, or a list of 1 to {MOST_INPUTS} of them", "input")
        return [self.input] if isinstance(self.input[0], int) else self.input


def _plan(service: Service, body: bytes) -> tuple[EmbeddingRequest, list[Prompt]]:
    asked = read_request(body, EmbeddingRequest, _HARMLESS, {})
    service.check_model(asked.model)
    facts = service.client.ready.pooling
    if facts is None or facts.task != "embed":
        does = "continues texts: ask /v1/chat/completions" if facts is None else "gives labels, no embeddings"
        raise InvalidParameter(f"{service.model} {does}", "model")
    if asked.dimensions is not None and not 1 <= asked.dimensions <= facts.width:
        raise InvalidParameter(
            f"dimensions must be from 1 to {facts.width}, but is {asked.dimensions}", "dimensions"
        )
    limit, cut = service.client.ready.max_model_len, asked.truncate_prompt_tokens
    prompts = [
        encode_prompt(
            service.tokenizer,
            one,
            add_special_tokens=asked.add_special_tokens,
            param="input",
            max_model_len=limit + 1 if cut is None else None,
        )
        for one in asked.inputs()
    ]
    if cut is not None:
        truncation = Truncation(cut, asked.truncation_side)
        prompts = [truncation.apply(prompt, limit) for prompt in prompts]
    for prompt in prompts:
        if len(prompt.token_ids) > limit:
            error = ContextLengthExceeded(len(prompt.token_ids), 0, limit)
            error.param = "input"
            raise error
    return asked, prompts


async def _vectors(
    service: Service, asked: EmbeddingRequest, prompts: list[Prompt], request: Request
) -> list[Any]:
    """float32 [width] for each prompt, in order; fewer if the client hung up."""
    name = uuid.uuid4().hex
    feed = service.streams.submit(
        [
            EngineRequest(
                request_id=f"{name}-{i}",
                prompt_token_ids=prompt.token_ids,
                params=SamplingParams(),
                arrival_time=time.monotonic(),
                pool=Pool(dimensions=asked.dimensions),
                priority=asked.priority,
            )
            for i, prompt in enumerate(prompts)
        ]
    )
    found: dict[int, Any] = {}
    watcher = asyncio.create_task(watch_disconnect(request.receive, feed))
    try:
        while deltas := await feed.read():
            for delta in deltas:
                if delta.embedding is None:
                    raise GenerationFailed(delta.error or "the engine gave no vector")
                found[int(delta.request_id.rpartition("-")[2])] = np.frombuffer(delta.embedding, np.float32)
    finally:
        watcher.cancel()
        feed.close()
    return [found[i] for i in sorted(found)]


def add_routes(app: FastAPI, service: Service) -> None:
    async def embed(request: Request) -> Response:
        """A vector for each input."""

        async def answer() -> Response:
            body = await read_body(request, service.config.max_body_bytes)
            asked, prompts = await service.in_thread(_plan, service, body)
            vectors = await _vectors(service, asked, prompts, request)
            as_text = asked.encoding_format == "base64"
            data = [
                {
                    "object": "embedding",
                    "index": i,
                    "embedding": base64.b64encode(v.astype("<f4").tobytes()).decode()
                    if as_text
                    else v.tolist(),
                }
                for i, v in enumerate(vectors)
            ]
            tokens = sum(len(p.token_ids) for p in prompts)
            usage = {"prompt_tokens": tokens, "total_tokens": tokens}
            return json_response({"object": "list", "model": service.model, "data": data, "usage": usage})

        return await service.respond(answer)

    app.add_api_route("/v1/embeddings", embed, methods=["POST"], openapi_extra=body_schema(EmbeddingRequest))
