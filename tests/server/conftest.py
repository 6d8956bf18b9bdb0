"""A live server over the fake engine: uvicorn in a thread, on a free port."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import openai
import pytest
from fastapi import FastAPI

from compilerllm.server.app import build_app
from compilerllm.server.config import ServerConfig
from compilerllm.server.run import address_of, bind, make_server
from compilerllm.text.tokenizer import Tokenizer
from tests.server.fake_engine import FakeEngine
from tests.text.tiny_tokenizers import byte_level, save_tokenizer

TEMPLATE = (
    "{% for m in messages %}{{ m.content }}{% endfor %}"  # so that the fake engine answers with the content
)


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return save_tokenizer(byte_level(), tmp_path_factory.mktemp("served"), chat_template=TEMPLATE)


@dataclass
class Live:
    """A running server and what stands behind it."""

    url: str
    app: FastAPI
    engine: Any  # FakeEngine, but for the tests of engine processes
    http: httpx.Client
    client: openai.OpenAI

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.http.post(path, json=body)

    def wait_until(self, holds: Callable[[], bool], seconds: float = 5.0) -> None:
        end = time.monotonic() + seconds
        while not holds():
            assert time.monotonic() < end, "it did not become so in time"
            time.sleep(0.01)


@contextmanager
def serve(tokenizer: Tokenizer, config: ServerConfig, engine: Any, **options: Any) -> Iterator[Live]:
    """``options`` are those of ``build_app``."""
    listener = bind(config)
    app = build_app(engine, tokenizer, config, "fake", **options)
    server = make_server(app, config)
    thread = threading.Thread(target=lambda: server.run(sockets=[listener]), daemon=True)
    thread.start()
    url = address_of(listener, config)
    try:
        with httpx.Client(base_url=url, timeout=20) as http:
            live = Live(
                url,
                app,
                engine,
                http,
                openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0, timeout=20),
            )
            live.wait_until(lambda: server.started)
            yield live
            live.client.close()
    finally:
        server.should_exit = server.force_exit = True
        thread.join(10)
        assert not thread.is_alive()


Start = Callable[..., Live]


@pytest.fixture
def start(tokenizer: Tokenizer) -> Iterator[Start]:
    """Start a server: keyword arguments are those of ``FakeEngine``, ``config`` of ``ServerConfig``."""
    with ExitStack() as stack:

        def start_one(
            config: dict[str, Any] | None = None, text: Tokenizer | None = None, **engine: Any
        ) -> Live:
            fake = FakeEngine(vocab_size=tokenizer.vocab_size, **engine)
            return stack.enter_context(serve(text or tokenizer, ServerConfig(port=0, **(config or {})), fake))

        yield start_one


@pytest.fixture(scope="session")
def shared(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """One server for all tests that leave it as it was."""
    with serve(tokenizer, ServerConfig(port=0), FakeEngine(vocab_size=tokenizer.vocab_size)) as live:
        yield live


@pytest.fixture
def live(shared: Live) -> Iterator[Live]:
    """The shared server; afterwards it must be alive and hold nothing."""
    yield shared
    shared.wait_until(lambda: shared.engine.num_open == 0)
    assert shared.http.get("/health").status_code == 200
