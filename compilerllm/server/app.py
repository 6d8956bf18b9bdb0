"""The application: every API's routes over one service."""

from fastapi import FastAPI

from compilerllm import __version__
from compilerllm.runtime.client import EngineClient
from compilerllm.server.auth import RequireKey
from compilerllm.server.config import ServerConfig
from compilerllm.server.errors import install_error_handlers
from compilerllm.server.routes import chat, completions, models, operations
from compilerllm.server.service import Service
from compilerllm.text.tokenizer import Tokenizer

APIS = (chat, completions, models, operations)


def build_app(client: EngineClient, tokenizer: Tokenizer, config: ServerConfig, model: str) -> FastAPI:
    """The ASGI application over an engine that is ready, which stays its caller's. ``model`` is the API's name for it."""
    service = Service(client, tokenizer, config, model)
    app = FastAPI(title="compilerllm", version=__version__, lifespan=service.lifespan, redirect_slashes=False)
    app.state.service = service
    install_error_handlers(app)
    for api in APIS:
        api.add_routes(app, service)
    if config.api_key is not None:
        app.add_middleware(RequireKey, api_key=config.api_key)
    return app
