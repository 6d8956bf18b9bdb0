"""The application: routes, and the path of a request from its body to its response."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from compilerllm import __version__
from compilerllm.errors import InvalidParameter
from compilerllm.runtime.client import EngineClient
from compilerllm.server import metrics as metrics_module
from compilerllm.server.auth import RequireKey
from compilerllm.server.config import ServerConfig
from compilerllm.server.errors import BodyTooLarge, ModelNotFound, error_response, install_error_handlers
from compilerllm.server.generation import Generation, Plan
from compilerllm.server.protocol import (
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    read_request,
    sampling_defaults,
)
from compilerllm.server.responses import ChatShape, CompletionShape, Shape
from compilerllm.server.sse import EventStream
from compilerllm.server.streams import EngineStreams, watch_disconnect
from compilerllm.text.chat import render_chat
from compilerllm.text.prompts import encode_prompt, fit_params
from compilerllm.text.tokenizer import Tokenizer

_MAX_SEQUENCES = 1024  # prompts times n of one request

Planner = Callable[[bytes], tuple[Any, Plan]]  # body -> what was asked, ready to run


class Service:
    """What the routes share: engine, tokenizer, limits, metrics."""

    def __init__(self, client: EngineClient, tokenizer: Tokenizer, config: ServerConfig, model: str) -> None:
        self.client, self.tokenizer, self.config = client, tokenizer, config
        self.model = model
        self.created = int(time.time())
        self.streams = EngineStreams(client)
        self.metrics = metrics_module.Metrics(self.streams, client.ready, model)
        self._defaults = sampling_defaults(tokenizer.generation_config)
        # Own threads, and few: tokenization must neither block the loop nor take the cores from the engine.
        self._threads = ThreadPoolExecutor(config.tokenizer_threads, thread_name_prefix="tokenize")

    @asynccontextmanager
    async def lifespan(self, _: FastAPI) -> AsyncIterator[None]:
        self.streams.start()
        try:
            yield
        finally:
            await self.streams.stop()
            self._threads.shutdown(wait=False, cancel_futures=True)

    async def chat(self, request: Request) -> Response:
        """Continue a chat with an assistant's message."""
        return await self._answer_or_refuse(request, self._plan_chat, ChatShape)

    async def complete(self, request: Request) -> Response:
        """Continue one or several prompts."""
        return await self._answer_or_refuse(request, self._plan_completion, CompletionShape)

    async def _answer_or_refuse(
        self, request: Request, plan: Planner, shape: Callable[..., Shape]
    ) -> Response:
        try:
            return await self._answer(request, plan, shape)
        except ClientDisconnect:  # before the body was whole; nobody reads this
            return Response(status_code=400)
        except Exception as error:  # noqa: BLE001 - logged if unforeseen; raised, it would cost the connection
            return error_response(error)

    async def _answer(self, request: Request, plan: Planner, shape_type: Callable[..., Shape]) -> Response:
        arrived = time.monotonic()
        body = await read_body(request, self.config.max_body_bytes)
        asked, planned = await asyncio.get_running_loop().run_in_executor(self._threads, plan, body)
        generation = Generation(planned, self.streams, self.tokenizer, self.metrics, arrived)
        shape = shape_type(asked, self.model, self.tokenizer, generation)
        if asked.stream:
            return EventStream(generation, shape.stream())
        watcher = asyncio.create_task(watch_disconnect(request.receive, generation.feed))
        try:
            return Response(await shape.whole(), media_type="application/json")
        finally:
            watcher.cancel()
            generation.close()

    # in a thread

    def _plan_chat(self, body: bytes) -> tuple[ChatRequest, Plan]:
        asked = read_request(body, ChatRequest)
        self._check_model(asked)
        text = render_chat(
            self.tokenizer,
            self.model,
            asked.messages,
            add_generation_prompt=asked.add_generation_prompt,
            continue_final_message=asked.continue_final_message,
        )
        return asked, self._plan(asked, [text], "messages")

    def _plan_completion(self, body: bytes) -> tuple[CompletionRequest, Plan]:
        asked = read_request(body, CompletionRequest)
        self._check_model(asked)
        return asked, self._plan(asked, asked.prompts(), "prompt")

    def _plan(self, asked: ChatRequest | CompletionRequest, prompts: list[Any], param: str) -> Plan:
        params = asked.sampling_params(self._defaults)
        if len(prompts) * params.n > _MAX_SEQUENCES:
            raise InvalidParameter(
                f"prompts times n is {len(prompts) * params.n}, more than {_MAX_SEQUENCES}", "n"
            )
        # A chat template writes the special tokens itself.
        special = param == "prompt"
        limit = self.client.ready.max_model_len
        encoded = [
            encode_prompt(self.tokenizer, p, add_special_tokens=special, param=param, max_model_len=limit)
            for p in prompts
        ]
        fitted = [fit_params(params, len(p.token_ids), limit, param) for p in encoded]
        return Plan(encoded, fitted, asked.cache_salt)

    def _check_model(self, asked: GenerationRequest) -> None:
        if asked.model is not None and asked.model != self.model:
            raise ModelNotFound(asked.model, self.model)

    # operations

    async def models(self) -> Response:
        """The one model that is served."""
        return _json({"object": "list", "data": [self._describe_model()]})

    async def model_by_name(self, name: str) -> Response:
        """The served model, if it has this name."""
        if name != self.model:
            raise ModelNotFound(name, self.model)
        return _json(self._describe_model())

    def _describe_model(self) -> dict[str, Any]:
        return {
            "id": self.model,
            "object": "model",
            "created": self.created,
            "owned_by": "compilerllm",
            "root": self.model,
            "max_model_len": self.client.ready.max_model_len,
        }

    async def health(self) -> Response:
        """200 while requests can be served, 503 while the engine is down."""
        return Response(status_code=200 if self.streams.alive else 503)

    async def version(self) -> Response:
        """The version of compilerllm."""
        return _json({"version": __version__})

    async def show_metrics(self) -> Response:
        """Prometheus metrics."""
        return Response(self.metrics.text(), media_type=metrics_module.CONTENT_TYPE)


async def read_body(request: Request, limit: int) -> bytes:
    """The request's body. Raises ``BodyTooLarge`` as soon as more than ``limit`` bytes are announced or have come."""
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > limit:
        raise BodyTooLarge(limit)
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > limit:
            raise BodyTooLarge(limit)
    return bytes(body)


def build_app(client: EngineClient, tokenizer: Tokenizer, config: ServerConfig, model: str) -> FastAPI:
    """The ASGI application over an engine that is ready, which stays its caller's. ``model`` is the API's name for it."""
    service = Service(client, tokenizer, config, model)
    app = FastAPI(title="compilerllm", version=__version__, lifespan=service.lifespan, redirect_slashes=False)
    app.state.service = service
    install_error_handlers(app)
    app.add_api_route(
        "/v1/chat/completions", service.chat, methods=["POST"], openapi_extra=_body_schema(ChatRequest)
    )
    app.add_api_route(
        "/v1/completions", service.complete, methods=["POST"], openapi_extra=_body_schema(CompletionRequest)
    )
    app.add_api_route("/v1/models", service.models, methods=["GET"])
    app.add_api_route("/v1/models/{name:path}", service.model_by_name, methods=["GET"])
    app.add_api_route("/health", service.health, methods=["GET"])
    app.add_api_route("/version", service.version, methods=["GET"])
    app.add_api_route("/metrics", service.show_metrics, methods=["GET"])
    if config.api_key is not None:
        app.add_middleware(RequireKey, api_key=config.api_key)
    return app


def _body_schema(kind: type[GenerationRequest]) -> dict[str, Any]:
    """The OpenAPI description of a body that FastAPI does not parse itself."""
    (schema,), parts = msgspec.json.schema_components([kind], ref_template="#/{name}")
    schema = _inline(schema, parts)
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def _inline(schema: Any, parts: dict[str, Any]) -> Any:
    """``schema`` with references replaced by what they refer to, since a route's extra cannot add components."""
    if isinstance(schema, list):
        return [_inline(item, parts) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        return _inline(parts[schema["$ref"].removeprefix("#/")], parts)
    return {key: _inline(value, parts) for key, value in schema.items()}


def _json(content: Any) -> Response:
    return Response(msgspec.json.encode(content), media_type="application/json")
