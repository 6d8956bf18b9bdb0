"""How many requests at once, how long their bodies may take, and what happens to new ones while the server drains."""

import asyncio

from starlette._utils import get_route_path
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from compilerllm.server.auth import OPEN_PATHS
from compilerllm.server.config import ServerConfig
from compilerllm.server.errors import BodyTimeout, Draining, HeadersTooLarge, TooManyRequests, error_response

MAX_HEADERS = 256


class Gate:
    """Counts the open requests, but for probes, and refuses more than there may be."""

    def __init__(self, limit: int | None) -> None:
        self._limit = limit
        self.num_open = 0
        self.num_refused = 0
        self.draining = False  # set once, when the server is told to end

    def enter(self, begins_work: bool = True) -> None:
        """Raises ``Draining`` or ``TooManyRequests``; otherwise ``leave`` must follow.

        begins_work: nothing that does is taken any more while the server drains.
        """
        if self.draining and begins_work:
            raise Draining()
        if self._limit is not None and self.num_open >= self._limit:
            self.num_refused += 1
            raise TooManyRequests(self._limit)
        self.num_open += 1

    def leave(self) -> None:
        self.num_open -= 1


class Limits:
    """The middleware around everything but ``OPEN_PATHS``."""

    def __init__(self, app: ASGIApp, gate: Gate, config: ServerConfig) -> None:
        self._app, self._gate, self._body_timeout = app, gate, config.body_timeout
        # The parser refuses more too, but only where they come in pieces.
        self._max_bytes = config.max_header_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = get_route_path(scope)
        size = sum(len(name) + len(value) for name, value in scope["headers"]) + len(scope["raw_path"])
        if len(scope["headers"]) > MAX_HEADERS or size + len(scope["query_string"]) > self._max_bytes:
            error = HeadersTooLarge(MAX_HEADERS, self._max_bytes)
            await error_response(error, path)(scope, receive, send)
            return
        if path in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        try:
            # A response that is made in the background can be looked at and ended until the server has gone.
            self._gate.enter(begins_work=not path.startswith("/v1/responses/"))
        except (Draining, TooManyRequests) as refused:
            await error_response(refused, path)(scope, receive, send)
            return
        try:
            await self._app(scope, _in_time(receive, self._body_timeout), send)
        finally:
            self._gate.leave()


def _in_time(receive: Receive, seconds: float) -> Receive:
    """``receive`` that raises ``BodyTimeout`` if the body is not whole ``seconds`` from now; afterwards it may wait."""
    deadline = asyncio.get_running_loop().time() + seconds
    more = True

    async def receive_in_time() -> Message:
        nonlocal more
        if not more:
            return await receive()
        try:
            async with asyncio.timeout_at(deadline):
                message = await receive()
        except TimeoutError:
            raise BodyTimeout(seconds) from None
        more = message["type"] == "http.request" and message.get("more_body", False)
        return message

    return receive_in_time
