"""The application: every API's routes over one service, behind what guards, limits and observes them."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from compilerllm import __version__
from compilerllm.runtime.client import EngineClient
from compilerllm.server.auth import KeyRing, RequireKey
from compilerllm.server.config import ServerConfig
from compilerllm.server.errors import install_error_handlers
from compilerllm.server.limits import Limits
from compilerllm.server.observe import Observe
from compilerllm.server.openapi import document
from compilerllm.server.request_log import RequestLog
from compilerllm.server.routes import (
    batch_chat,
    chat,
    completions,
    embeddings,
    messages,
    models,
    operations,
    pooling,
    responses,
    scoring,
    tokenize,
)
from compilerllm.server.service import Service
from compilerllm.server.shortcut import Shortcut
from compilerllm.server.stats_line import log_stats
from compilerllm.server.tracing import Tracing, open_tracing
from compilerllm.text.tokenizer import Tokenizer

APIS = (
    chat, batch_chat, completions, embeddings, scoring, pooling, responses, messages, tokenize, models, operations,
)  # fmt: skip


def build_app(
    client: EngineClient,
    tokenizer: Tokenizer,
    config: ServerConfig,
    model: str,
    tracing: Tracing | None = None,
) -> FastAPI:
    """The ASGI application over an engine that is ready, which stays its caller's. ``model`` is the API's name for it.

    ``state.reload()`` of the result reads the keys and opens the log anew; ``state.gate`` counts what is open.
    """
    keys = KeyRing(config)
    request_log = RequestLog(config) if config.log_requests != "off" else None
    if tracing is None and config.otlp_traces_endpoint is not None:
        tracing = open_tracing(config.otlp_traces_endpoint, model)
    service = Service(client, tokenizer, config, model)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with service.lifespan(app):
            tasks = []
            if config.stats_interval:
                tasks.append(asyncio.create_task(log_stats(service.streams, config.stats_interval)))
            try:
                yield
            finally:
                for task in tasks:
                    task.cancel()
        for end in [part.close for part in (request_log, tracing) if part is not None]:
            await asyncio.to_thread(end)  # what waits is written or sent

    app = FastAPI(
        title="compilerllm",
        version=__version__,
        lifespan=lifespan,
        redirect_slashes=False,
        openapi_url=None
        if config.disable_fastapi_docs
        else "/openapi.json",  # without it there are no docs either
    )
    app.state.service = service
    app.state.gate = service.gate
    app.state.reload = _reload(keys, request_log)
    install_error_handlers(app)
    for api in APIS:
        api.add_routes(app, service)
    document(app, guarded=len(keys) > 0)
    # The last one added is the outermost.
    app.add_middleware(Shortcut, routes=app)
    app.add_middleware(Limits, gate=service.gate, config=config)
    app.add_middleware(RequireKey, keys=keys)
    if config.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=config.allowed_origins,
            allow_methods=config.allowed_methods,
            allow_headers=config.allowed_headers,
            allow_credentials=config.allow_credentials,
            expose_headers=["X-Request-Id"],
        )
    app.add_middleware(Observe, access_log=config.access_log, request_log=request_log, tracing=tracing)
    return app


def _reload(keys: KeyRing, request_log: RequestLog | None) -> Callable[[], None]:
    def reload() -> None:
        keys.reload()
        if request_log is not None:
            request_log.reopen()

    return reload
