"""Server-sent events: a response that sends as tokens come and stops when the client does."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from compilerllm.server.errors import error_body, log_unforeseen
from compilerllm.server.generation import Generation
from compilerllm.server.streams import watch_disconnect

DONE = b"data: [DONE]\n\n"


def event(data: Any) -> bytes:
    return b"data: " + msgspec.json.encode(data) + b"\n\n"


class EventStream(Response):
    """Sends ``events`` (each item is one or more whole events) and closes the generation, however it ends.

    An error after the first byte cannot change the status any more: it is sent as an event with OpenAI's error body.
    """

    def __init__(self, generation: Generation, events: AsyncIterator[bytes]) -> None:
        super().__init__(media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        del self.headers["content-length"]  # Response sets it for its empty body
        self._generation, self._events = generation, events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        watcher = asyncio.create_task(watch_disconnect(receive, self._generation.feed))
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            try:
                async for chunk in self._events:
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
            except Exception as error:  # noqa: BLE001 - told to the client, and logged if it is none of ours
                log_unforeseen(error)
                await send(
                    {"type": "http.response.body", "body": event(error_body(error)), "more_body": True}
                )
            await send({"type": "http.response.body", "body": DONE, "more_body": False})
        finally:
            watcher.cancel()
            self._generation.close()
