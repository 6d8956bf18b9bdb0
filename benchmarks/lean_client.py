"""Many streams of OpenAI's API over raw sockets: one thread that sends, waits, and looks at the ends.

Where server and client share two cores, a client takes from the server what it measures. Here a piece of a stream costs
a wait and a read; nothing is parsed but the last events of a stream.
"""

import json
import re
import selectors
import socket
import time
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

_TAIL = (
    2048  # bytes of a stream's end that are kept: the event with the usage, [DONE] and the last chunk's mark
)
_END = b"0\r\n\r\n"
_USAGE = re.compile(rb'"completion_tokens": ?(\d+)')


@dataclass
class Streamed:
    """All streams of a round. tokens: of each, as the server counts them; reads: pieces that came, of all streams."""

    seconds: float
    tokens: list[int]
    reads: int


class LeanClient:
    """Connections to one server, kept open from round to round."""

    def __init__(self, url: str, count: int) -> None:
        """url: with /v1."""
        parts = urlsplit(url)
        assert parts.hostname is not None and parts.port is not None, f"{url} names no host and port"
        self._host, self._base = parts.netloc, parts.path.rstrip("/")
        self._sockets = [socket.create_connection((parts.hostname, parts.port)) for _ in range(count)]

    def model(self) -> str:
        """The first model that the server lists."""
        self._sockets[0].sendall(f"GET {self._base}/models HTTP/1.1\r\nHost: {self._host}\r\n\r\n".encode())
        answer = b""
        while not (found := re.search(rb'"id": ?"([^"]+)".*\}', answer, re.DOTALL)):
            answer += self._sockets[0].recv(1 << 16)
        return found[1].decode()

    def stream(self, bodies: list[dict[str, Any]]) -> Streamed:
        """POST each body to /completions at once, and read all answers to their ends."""
        usage = {"stream": True, "stream_options": {"include_usage": True}}
        requests = [self._request(json.dumps(body | usage).encode()) for body in bodies]
        tails = dict.fromkeys(self._sockets[: len(bodies)], b"")
        reads = 0
        with selectors.DefaultSelector() as waiting:
            for connection in tails:
                waiting.register(connection, selectors.EVENT_READ)
            start = time.perf_counter()
            for connection, request in zip(tails, requests, strict=True):
                connection.sendall(request)
            while waiting.get_map():
                for key, _ in waiting.select():
                    connection = key.fileobj
                    assert isinstance(connection, socket.socket)
                    piece = connection.recv(1 << 16)
                    reads += 1
                    tails[connection] = (tails[connection] + piece)[-_TAIL:]
                    if not piece or piece.endswith(_END):
                        waiting.unregister(connection)
            seconds = time.perf_counter() - start
        return Streamed(seconds, [_tokens(tail) for tail in tails.values()], reads)

    def _request(self, body: bytes) -> bytes:
        head = f"POST {self._base}/completions HTTP/1.1\r\nHost: {self._host}\r\nContent-Type: application/json\r\n"
        return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body

    def close(self) -> None:
        for connection in self._sockets:
            connection.close()


def _tokens(tail: bytes) -> int:
    counts = _USAGE.findall(tail)
    if not counts or b"data: [DONE]" not in tail:
        raise SystemExit(f"a stream ended without its usage: {tail[-500:]!r}")
    return int(counts[-1])
