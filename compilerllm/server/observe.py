"""Around every request: its id, its line in the access log, its entry in the request log, its trace."""

import logging
import time

from starlette._utils import get_route_path
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from compilerllm.server.auth import OPEN_PATHS
from compilerllm.server.connection import SEND_PIECE
from compilerllm.server.records import RequestRecord, begin_record, choose_request_id
from compilerllm.server.request_log import Kept, RequestLog
from compilerllm.server.tracing import Tracing

_access_log = logging.getLogger("compilerllm.access")


class Observe:
    """The outermost middleware."""

    def __init__(
        self, app: ASGIApp, access_log: bool, request_log: RequestLog | None, tracing: Tracing | None
    ) -> None:
        self._app = app
        self._access_log, self._request_log, self._tracing = access_log, request_log, tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        record = _record_of(scope)
        begin_record(record)
        probe = get_route_path(scope) in OPEN_PATHS
        entries = None if probe or self._request_log is None else self._request_log
        asked = entries.keep_request() if entries else None
        answered = entries.keep_response() if entries else None
        if answered is not None:
            scope.get("extensions", {}).pop(SEND_PIECE, None)  # all of the answer is to come by here

        async def receive_and_keep() -> Message:
            message = await receive()
            if asked is not None and message["type"] == "http.request":
                asked.add(message.get("body", b""))
            return message

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                MutableHeaders(scope=message)["X-Request-Id"] = record.request_id
            elif message["type"] == "http.response.body":
                record.first_byte = record.first_byte or time.monotonic()
                if answered is not None:
                    answered.add(message.get("body", b""))
            await send(message)

        try:
            await self._app(scope, receive_and_keep if asked else receive, send_with_id)
        finally:
            record.ended = time.monotonic()
            self._tell(record, scope, probe, asked, answered)

    def _tell(
        self, record: RequestRecord, scope: Scope, probe: bool, asked: Kept | None, answered: Kept | None
    ) -> None:
        if self._access_log:
            milliseconds = (record.ended - record.arrived) * 1e3
            level = logging.DEBUG if probe else logging.INFO
            line = '%s "%s %s" %d %.1f ms'
            _access_log.log(
                level, line, record.client, record.method, record.path, record.status, milliseconds
            )
        if self._request_log is not None and asked is not None and answered is not None:
            self._request_log.write(record, asked, answered)
        if self._tracing is not None and not probe:
            self._tracing.record(record, scope["headers"])


def _record_of(scope: Scope) -> RequestRecord:
    sent = next((value for name, value in scope["headers"] if name == b"x-request-id"), None)
    client = scope.get("client")
    where = f"{client[0]}:{client[1]}" if client else "-"
    # A path may have line breaks in it (%0a), which would forge lines of the log.
    path = scope["path"].encode("unicode_escape").decode("ascii")[:512]
    return RequestRecord(choose_request_id(sent), scope["method"], path, where)
