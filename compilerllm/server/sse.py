"""Server-sent events: a response that sends as tokens come and stops when the client does."""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from compilerllm.server.connection import SEND_PIECE, SendPiece
from compilerllm.server.errors import error_body, error_response, log_unforeseen
from compilerllm.server.generation import Generation
from compilerllm.server.streams import watch_disconnect

DONE = b"data: [DONE]\n\n"


def event(data: Any) -> bytes:
    return b"data: " + msgspec.json.encode(data) + b"\n\n"


def named_event(data: dict[str, Any]) -> bytes:
    """An event whose name is its ``type``."""
    return b"event: " + str(data["type"]).encode() + b"\n" + event(data)


def _openai_error(error: BaseException) -> bytes:
    return event(error_body(error))


@dataclass(frozen=True)
class Dialect:
    """How an API refuses a request, tells of an error within a stream, and ends a stream."""

    refuse: Callable[[BaseException], Response] = error_response
    error_event: Callable[[BaseException], bytes] = _openai_error
    end: bytes = DONE


OPENAI = Dialect()


class EventStream(Response):
    """Sends ``events`` (each item is one or more whole events) and closes the generation, however it ends.

    An error after the first byte cannot change the status any more: it is sent as an event.
    """

    def __init__(
        self, generation: Generation, events: AsyncIterator[bytes], dialect: Dialect = OPENAI
    ) -> None:
        super().__init__(media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        del self.headers["content-length"]  # Response sets it for its empty body
        self._generation, self._events, self._dialect = generation, events, dialect

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        watcher = asyncio.create_task(watch_disconnect(receive, self._generation.feed))
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            try:
                # A task of its own: a token wakes just it, not every middleware's coroutine around it.
                await asyncio.create_task(
                    self._send_events(send, scope.get("extensions", {}).get(SEND_PIECE))
                )
            except Exception as error:  # noqa: BLE001 - told to the client, and logged if it is none of ours
                log_unforeseen(error)
                told = self._dialect.error_event(error)
                await send({"type": "http.response.body", "body": told, "more_body": True})
            await send({"type": "http.response.body", "body": self._dialect.end, "more_body": False})
        finally:
            watcher.cancel()
            self._generation.close()

    async def _send_events(self, send: Send, send_piece: SendPiece | None) -> None:
        begun = False
        async for chunk in self._events:
            if begun and send_piece is not None:
                if (slow := send_piece(chunk)) is not None:
                    await slow
            else:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
                begun = True
