"""The request log, for audits: a JSON line for each request, written by a thread of its own."""

import logging
import os
import queue
import threading
import time
from datetime import UTC, datetime
from typing import IO, Any

import msgspec

from compilerllm.server.config import ServerConfig
from compilerllm.server.errors import CannotWriteRequestLog
from compilerllm.server.records import RequestRecord

log = logging.getLogger("compilerllm.server")
_MOST_WAITING = 4096  # entries
_PLAIN_TEXTS = frozenset(("model", "object", "tool_choice", "reasoning_effort", "encoding_format"))


class Kept:
    """A body on its way through: its size, and as much of it as the log wants."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.size = 0
        self.data = bytearray()

    def add(self, part: bytes) -> None:
        self.size += len(part)
        if (room := self._most - len(self.data)) > 0:
            self.data += part[:room]

    @property
    def whole(self) -> bool:
        return self.size == len(self.data)


class RequestLog:
    """Writes entries in order. The event loop only hands them over; a disk that is too slow loses lines, and says so."""

    def __init__(self, config: ServerConfig) -> None:
        """Raises ``CannotWriteRequestLog``. Nothing is opened where ``--log-requests`` is off."""
        self.full = config.log_requests == "full"
        self._path = config.request_log
        self._most = (
            config.request_log_bytes
        )  # also where no text is kept: a body that is cut off is only counted
        self._file = self._open()
        self._reopen = threading.Event()
        self._entries: queue.Queue[tuple[RequestRecord, Kept, Kept] | None] = queue.Queue(_MOST_WAITING)
        self._lost = 0
        self._thread = threading.Thread(target=self._run, name="request-log", daemon=True)
        self._thread.start()

    def keep_request(self) -> Kept:
        return Kept(self._most)

    def keep_response(self) -> Kept:
        return Kept(self._most if self.full else 0)

    def write(self, record: RequestRecord, request: Kept, response: Kept) -> None:
        try:
            self._entries.put_nowait((record, request, response))
        except queue.Full:
            self._lost += 1
            log.error(
                "The request log lost the entry of %s: its disk is too slow (%d lost).",
                record.request_id,
                self._lost,
            )

    def reopen(self) -> None:
        """Open the file anew before the next entry, so that it may have been moved away."""
        self._reopen.set()

    def close(self) -> None:
        """Write what waits, and close the file."""
        self._entries.put(None)
        self._thread.join(10)

    def _open(self) -> IO[str] | None:
        if self._path is None:
            return None
        try:
            # Prompts are nobody else's business.
            descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        except OSError as error:
            raise CannotWriteRequestLog(self._path, os.strerror(error.errno or 0)) from error
        return open(descriptor, "a", encoding="utf-8")

    def _run(self) -> None:
        while (entry := self._entries.get()) is not None:
            try:
                self._write(msgspec.json.encode(self._entry(*entry)).decode())
            except (OSError, ValueError, CannotWriteRequestLog) as error:
                self._lost += 1
                log.error("The request log lost the entry of %s: %s", entry[0].request_id, error)
        if self._file is not None:
            self._file.close()

    def _write(self, line: str) -> None:
        if self._reopen.is_set():
            self._reopen.clear()
            old, self._file = self._file, self._open()
            if old is not None:
                old.close()
        if self._file is None:
            log.info("%s", line)
        else:
            self._file.write(line + "\n")
            self._file.flush()

    def _entry(self, record: RequestRecord, request: Kept, response: Kept) -> dict[str, Any]:
        began = time.time() - (time.monotonic() - record.arrived)
        entry: dict[str, Any] = {
            "time": datetime.fromtimestamp(began, UTC).isoformat(timespec="milliseconds"),
            "request_id": record.request_id,
            "client": record.client,
            "key": record.key,
            "method": record.method,
            "path": record.path,
            "status": record.status,
            "seconds": round(record.ended - record.arrived, 4),
            "request_bytes": request.size,
            "response_bytes": response.size,
            "prompt_tokens": record.prompt_tokens,
            "cached_tokens": record.cached_tokens,
            "completion_tokens": record.completion_tokens,
            "finish_reasons": dict(record.finish_reasons),
        }
        if record.first_token:
            entry["first_token_seconds"] = round(record.first_token - record.arrived, 4)
        asked = _decode(request)
        entry["request"] = asked if self.full else redact(asked)
        if self.full:
            entry["response"] = _decode(response)
        return entry


def _decode(kept: Kept) -> Any:
    """The body as JSON; as text where it is none, or is cut off; None where there is none."""
    if not kept.size:
        return None
    if kept.whole:
        try:
            return msgspec.json.decode(kept.data)
        except (msgspec.DecodeError, RecursionError):
            pass  # a stream of events, or what was refused for being no JSON: a text is as good
    text = kept.data.decode("utf-8", "replace")
    return text if kept.whole else text + f" [cut off: {kept.size} bytes]"


def redact(body: Any) -> Any:
    """What a body says without what a user wrote in it: numbers and switches stay, texts and lists become their sizes."""
    if isinstance(body, dict):
        return {_name(key): _redact_value(key, value) for key, value in list(body.items())[:100]}
    return _redact_value("", body)


def _name(key: Any) -> str:
    return key if isinstance(key, str) and key.isidentifier() and len(key) <= 64 else "<a name>"


def _redact_value(key: Any, value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, str):
        return value[:128] if key in _PLAIN_TEXTS else f"<{len(value)} characters>"
    return f"<{len(value)} items>"
