"""What all routes share: the engine, the tokenizer, limits, metrics, and the way of a request from its body to its answer."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any, Protocol, TypeVar

import msgspec
from fastapi import FastAPI, Request
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from compilerllm.errors import InvalidParameter
from compilerllm.parsing.choose import OutputFormat, choose_format
from compilerllm.runtime.client import EngineClient
from compilerllm.sampling_params import SamplingParams
from compilerllm.server import metrics as metrics_module
from compilerllm.server.config import ServerConfig
from compilerllm.server.errors import BodyTooLarge, ModelNotFound, UnknownField
from compilerllm.server.generation import PLAIN, Generation, Plan, PlanOptions
from compilerllm.server.limits import Gate
from compilerllm.server.protocol import sampling_defaults
from compilerllm.server.sse import OPENAI, Dialect, EventStream
from compilerllm.server.streams import EngineStreams, watch_disconnect
from compilerllm.text.prompts import encode_bad_words, encode_prompt, fit_params
from compilerllm.text.tokenizer import Tokenizer

_MAX_SEQUENCES = 1024  # prompts times n of one request
log = logging.getLogger("compilerllm.server")
_T = TypeVar("_T")


class Shape(Protocol):
    """Makes an API's bodies of a generation. ``stream`` and ``whole`` are the two ways; one of them is used, once."""

    def stream(self) -> AsyncIterator[bytes]:
        """Server-sent events, one or more whole ones an item."""
        ...

    async def whole(self) -> bytes:
        """The response body when nothing more comes. Empty bytes if the client hung up meanwhile."""
        ...


class Service:
    """What the routes share: engine, tokenizer, limits, metrics."""

    def __init__(self, client: EngineClient, tokenizer: Tokenizer, config: ServerConfig, model: str) -> None:
        self.client, self.tokenizer, self.config = client, tokenizer, config
        self.model = model
        self.created = int(time.time())
        self.gate = Gate(config.max_concurrent_requests)
        self.streams = EngineStreams(client, config.max_unread_steps)
        self.metrics = metrics_module.Metrics(
            self.streams, client.ready, model, self.gate, vllm_names=config.vllm_metric_names
        )
        self.sampling_defaults = sampling_defaults(tokenizer.generation_config)
        self.output_format = output_format(tokenizer, config)
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

    # -- from body to answer --------------------------------------------------------------------------------------

    async def respond(self, answer: Callable[[], Any], dialect: Dialect = OPENAI) -> Response:
        """The response that ``await answer()`` gives, or the refusal of what it raises."""
        try:
            response: Response = await answer()
            return response
        except ClientDisconnect:  # before the body was whole; nobody reads this
            return Response(status_code=400)
        except Exception as error:  # noqa: BLE001 - logged if unforeseen; raised, it would cost the connection
            return dialect.refuse(error)

    async def in_thread(self, work: Callable[..., _T], *arguments: Any) -> _T:
        """Run what takes long (parsing, templates, tokenization) beside the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *arguments)

    async def generate(
        self,
        request: Request,
        read: Callable[[bytes], tuple[_T, Plan]],
        shape: Callable[[_T, Generation], Shape],
        streams: Callable[[_T], bool],
        dialect: Dialect = OPENAI,
    ) -> Response:
        """Answer a request that generates: ``read`` checks the body and plans (in a thread), ``shape`` makes the body."""

        async def answer() -> Response:
            asked, generation = await self.begin(request, read)
            return await self.send(request, generation, shape(asked, generation), streams(asked), dialect)

        return await self.respond(answer, dialect)

    async def begin(
        self, request: Request, read: Callable[[bytes], tuple[_T, Plan]]
    ) -> tuple[_T, Generation]:
        """Read a request's body and start what it asks for."""
        arrived = time.monotonic()
        body = await read_body(request, self.config.max_body_bytes)
        asked, plan = await self.in_thread(read, body)
        generation = Generation(plan, self.streams, self.tokenizer, self.metrics, arrived)
        if plan.params[0].structured is not None:  # whose form may be refused when it is compiled
            await generation.begin()
        return asked, generation

    async def send(
        self, request: Request, generation: Generation, shaped: Shape, stream: bool, dialect: Dialect = OPENAI
    ) -> Response:
        """The response of a generation that has begun, which ends when the client hangs up."""
        if stream:
            return EventStream(generation, shaped.stream(), dialect)
        watcher = asyncio.create_task(watch_disconnect(request.receive, generation.feed))
        try:
            return Response(await shaped.whole(), media_type="application/json")
        finally:
            watcher.cancel()
            generation.close()

    # -- in a thread ----------------------------------------------------------------------------------------------

    def plan(
        self,
        prompts: list[Any],
        params: SamplingParams,
        options: PlanOptions = PLAIN,
        *,
        add_special_tokens: bool,
        param: str,
    ) -> Plan:
        """Prompts (texts or token ids) and how to continue them, checked against the model's context.

        ``param`` is the body's field that an error names.
        """
        if params.thinking_token_budget is not None and options.thinking is None:
            raise UnknownField(
                "thinking_token_budget needs a model whose thoughts are told apart between two marks (--reasoning-parser)",
                "thinking_token_budget",
            )
        self.check_priority(options.priority)
        if options.beams is not None and params.structured is not None:
            raise UnknownField(
                "use_beam_search cannot hold outputs to a form (a response format, or a call that is demanded)",
                "use_beam_search",
            )
        if len(prompts) * params.n > _MAX_SEQUENCES:
            raise InvalidParameter(
                f"prompts times n is {len(prompts) * params.n}, more than {_MAX_SEQUENCES}", "n"
            )
        limit, cut = self.client.ready.max_model_len, options.truncation
        encoded = [
            encode_prompt(
                self.tokenizer,
                p,
                add_special_tokens=add_special_tokens,
                param=param,
                max_model_len=limit if cut is None else None,
            )
            for p in prompts
        ]
        if cut is not None:
            room = max(1, limit - (params.max_tokens or 1))
            encoded = [cut.apply(p, room) for p in encoded]
        fitted = [fit_params(params, len(p.token_ids), limit, param) for p in encoded]
        bad_words = encode_bad_words(self.tokenizer, params.bad_words) if params.bad_words else []
        return Plan(encoded, fitted, options, bad_words)

    def check_priority(self, priority: int) -> None:
        """Raises ``InvalidParameter`` for one that this server does not heed."""
        if priority and self.client.ready.policy != "priority":
            raise InvalidParameter(
                "priority needs a server with --policy priority; this one takes requests as they come",
                "priority",
            )

    def check_model(self, asked: str | None) -> None:
        """Raises ``ModelNotFound`` for another model's name."""
        if asked is not None and asked != self.model:
            raise ModelNotFound(asked, self.model)


def output_format(tokenizer: Tokenizer, config: ServerConfig) -> OutputFormat:
    """How the model marks thoughts and calls, by flags or by its chat template. Raises ``UnknownParser``."""
    template = tokenizer.chat_template
    source = template.source if template is not None else ""
    chosen = choose_format(config.reasoning_parser, config.tool_call_parser, source)
    thoughts, calls = (name or "none" for name in chosen.names)
    log.info("Outputs are taken apart by the parsers %s (thoughts) and %s (calls of tools).", thoughts, calls)
    return chosen


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


def body_schema(kind: type[msgspec.Struct]) -> dict[str, Any]:
    """The OpenAPI description of a body that FastAPI does not parse itself, for a route's ``openapi_extra``."""
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


def json_response(content: Any, status: int = 200) -> Response:
    """A JSON body, encoded by msgspec."""
    return Response(msgspec.json.encode(content), status, media_type="application/json")
