"""One client's connection: cuts those that send no request, or do not read; refuses what is no HTTP in OpenAI's shape.

A streamed answer's pieces may go past ASGI and the HTTP parser's state machine (``SEND_PIECE``), which together would
take most of a token's time.
"""

import asyncio
import sys
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Any, cast

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from compilerllm.server.config import ServerConfig
from compilerllm.server.errors import MalformedRequest, error_response

_LINGER_SECONDS = 2.0
# An extension of the ASGI scope, there where an answer without a length is sent in chunks: sends a piece of an answer
# whose first piece has gone through ``send``, as the last one must. Returns what to wait for if the client is slow.
SEND_PIECE = "compilerllm.send_piece"
SendPiece = Callable[[bytes], Awaitable[None] | None]


class Connection(H11Protocol):
    """uvicorn's connection with two clocks: for a request's headers to come, and for an answer to be read."""

    def __init__(self, *args: Any, limits: ServerConfig, **options: Any) -> None:
        super().__init__(*args, **options)
        self._limits = limits
        self._header_clock: asyncio.TimerHandle | None = None
        self._read_clock: asyncio.TimerHandle | None = None
        self._refused = False  # what comes is no HTTP, and is not looked at any more

    # -- headers come ---------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_header_clock()

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        super().data_received(data)
        if self._request_is_open:
            self._stop_header_clock()
        elif self._header_clock is None:  # a further request on this connection has begun
            self._start_header_clock()

    def handle_events(self) -> None:
        before = self.scope
        super().handle_events()
        if self.scope is not before and self.scope["http_version"] == "1.1":  # the task has not begun yet
            self.scope["extensions"] = {SEND_PIECE: cast("dict[object, object]", self._send_piece)}

    @property
    def _request_is_open(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _start_header_clock(self) -> None:
        self._header_clock = self.loop.call_later(self._limits.header_timeout, self._headers_late)

    def _stop_header_clock(self) -> None:
        if self._header_clock is not None:
            self._header_clock.cancel()
            self._header_clock = None

    def _headers_late(self) -> None:
        self._header_clock = None
        if not self._request_is_open:
            self.transport.abort()

    # -- an answer goes -------------------------------------------------------------------------------------------

    def _send_piece(self, piece: bytes) -> Awaitable[None] | None:
        if self.cycle.disconnected:
            return None
        self.transport.write(b"%x\r\n%b\r\n" % (len(piece), piece))
        return self.flow.drain() if self.flow.write_paused else None

    def pause_writing(self) -> None:
        """The client has not read what the kernel and we hold for it (64 KiB here)."""
        self.flow.pause_writing()
        if self._read_clock is None:
            self._read_clock = self.loop.call_later(self._limits.send_timeout, self.transport.abort)

    def resume_writing(self) -> None:
        self.flow.resume_writing()
        self._stop_read_clock()

    def timeout_keep_alive_handler(self) -> None:
        """Close an idle connection; also one whose client never read the end of its answer."""
        super().timeout_keep_alive_handler()
        if self._read_clock is None:
            self._read_clock = self.loop.call_later(self._limits.send_timeout, self.transport.abort)

    def _stop_read_clock(self) -> None:
        if self._read_clock is not None:
            self._read_clock.cancel()
            self._read_clock = None

    # -- ends -----------------------------------------------------------------------------------------------------

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_header_clock()
        self._stop_read_clock()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """uvicorn calls this while it handles what the parser raised, which knows the right status."""
        status = getattr(sys.exc_info()[1], "error_status_hint", 400)
        response = error_response(MalformedRequest(msg, status))
        reason = HTTPStatus(response.status_code).phrase.encode()
        event = h11.Response(status_code=response.status_code, headers=response.raw_headers, reason=reason)
        parts = (event, h11.Data(data=bytes(response.body)), h11.EndOfMessage())
        if self.conn.our_state in (
            h11.IDLE,
            h11.SEND_RESPONSE,
        ):  # else an answer has begun, and cannot be taken back
            for part in parts:
                self.transport.write(self.conn.send(part) or b"")
        self._refused = True
        self._stop_header_clock()
        if self.transport.can_write_eof():
            # Closed while input waits, TCP would reset the connection, and the client might never see the answer.
            self.transport.write_eof()
            self._header_clock = self.loop.call_later(_LINGER_SECONDS, self.transport.abort)
        else:
            self.transport.close()
