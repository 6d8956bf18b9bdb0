"""HTTP/1.1 over asyncio, as much of it as a client of a model server needs: JSON bodies, streams, connections kept open.

It adds little to what it measures: a streamed token costs one ``readexactly`` and no thread.
"""

import asyncio
import ssl
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from compilerllm import __version__
from compilerllm.errors import CompilerLLMError, InvalidParameter

_CONNECT_SECONDS = 10.0
_BUFFER = 1 << 20  # bytes of one line or header that a server may send


class ServerUnreachable(CompilerLLMError):
    """No server answers at the URL, or the connection to it broke."""

    def __init__(self, url: str, reason: str) -> None:
        super().__init__(f"Cannot reach {url}: {reason}. Is a server there? `compilerllm serve` starts one.")


class NotHttp(CompilerLLMError):
    """What answers at the URL does not speak HTTP."""

    def __init__(self, url: str) -> None:
        super().__init__(f"What answers at {url} does not speak HTTP/1.1. Check --url.")


@dataclass
class _Connection:
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    used: bool = False  # whether an earlier request went over it


class HttpClient:
    """Requests to one server. Connections that are done with are used again; as many are open as there are requests.

    One event loop uses it. Raises ``InvalidParameter`` for what is no http or https URL.
    """

    def __init__(self, url: str, headers: Mapping[str, str] | None = None) -> None:
        """url: scheme, host and port count; paths come with the requests."""
        parts = urlsplit(url)
        try:
            port = parts.port
        except ValueError as error:
            raise InvalidParameter(f"--url {url!r} has no valid port: {error}", "url") from error
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise InvalidParameter(f"--url must be like http://127.0.0.1:8000/v1, but is {url!r}", "url")
        self.url = url
        self._host, self._port = parts.hostname, port or (443 if parts.scheme == "https" else 80)
        self._ssl = ssl.create_default_context() if parts.scheme == "https" else None
        fixed = {
            "Host": parts.netloc.rpartition("@")[2],
            "User-Agent": f"compilerllm/{__version__}",
            **(headers or {}),
        }
        for name, value in fixed.items():
            if not (value.isascii() and value.isprintable()):
                raise InvalidParameter(
                    f"the header {name} cannot have the value {value!r}: printable ASCII is wanted", name
                )
        self._headers = "".join(f"{name}: {value}\r\n" for name, value in fixed.items())
        self._idle: list[_Connection] = []

    async def request(self, method: str, path: str, body: bytes | None = None) -> "Response":
        """Send a request and read its answer's head. Raises ``ServerUnreachable`` or ``NotHttp``.

        The caller reads the answer to its end or closes it.
        """
        length = "" if body is None else f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        head = f"{method} {path} HTTP/1.1\r\n{self._headers}{length}\r\n".encode()
        while True:
            connection = await self._connect()
            try:
                connection.writer.write(head + (body or b""))
                await connection.writer.drain()
                status, headers = await self._read_head(connection.reader)
            except (OSError, asyncio.IncompleteReadError) as error:
                connection.writer.close()
                nothing_came = not getattr(error, "partial", b"")
                if connection.used and nothing_came:  # the server had closed it meanwhile: ask over another
                    continue
                raise ServerUnreachable(self.url, _reason(error)) from error
            except BaseException:
                connection.writer.close()
                raise
            connection.used = True
            return Response(self, connection, status, headers)

    async def _connect(self) -> _Connection:
        while self._idle:
            connection = self._idle.pop()
            if not (connection.reader.at_eof() or connection.writer.is_closing()):
                return connection
            connection.writer.close()
        try:
            async with asyncio.timeout(_CONNECT_SECONDS):
                return _Connection(
                    *await asyncio.open_connection(self._host, self._port, ssl=self._ssl, limit=_BUFFER)
                )
        except (OSError, TimeoutError) as error:
            raise ServerUnreachable(self.url, _reason(error)) from error

    async def _read_head(self, reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
        while True:
            try:
                lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
                version, _, rest = lines[0].partition(" ")
                status = int(rest[:3])
            except (asyncio.LimitOverrunError, ValueError) as error:
                raise NotHttp(self.url) from error
            if not version.startswith("HTTP/1."):
                raise NotHttp(self.url)
            if status >= 200:
                pairs = (line.partition(":") for line in lines[1:] if line)
                return status, {name.strip().lower(): value.strip() for name, _, value in pairs}

    def _release(self, connection: _Connection) -> None:
        self._idle.append(connection)

    async def close(self) -> None:
        """Close the connections that no request uses."""
        for connection in self._idle:
            connection.writer.close()
        self._idle.clear()
        await asyncio.sleep(0)  # the transports close in the loop


@dataclass
class Response:
    """An answer whose head has come. Headers' names are in lower case."""

    client: HttpClient
    connection: _Connection | None
    status: int
    headers: dict[str, str]

    async def read(self) -> bytes:
        """The whole body. Raises ``ServerUnreachable`` where the connection breaks before its end."""
        return b"".join([chunk async for chunk in self.chunks()])

    async def chunks(self) -> AsyncIterator[bytes]:
        """The body as it comes. Left early, the connection is closed, which tells the server to stop."""
        assert self.connection is not None, "the body was read already"
        reader, whole = self.connection.reader, False
        try:
            if "chunked" in self.headers.get("transfer-encoding", "").lower():
                while True:
                    line = await _line(reader)
                    size = int(line.partition(b";")[0], 16)
                    if size == 0:
                        break
                    yield (await reader.readexactly(size + 2))[:-2]
                while (await _line(reader)).strip():
                    pass
                whole = True
            elif "content-length" in self.headers or self.status in (204, 304):
                yield await reader.readexactly(int(self.headers.get("content-length", 0)))
                whole = True
            else:  # to the connection's end
                while chunk := await reader.read(1 << 16):
                    yield chunk
        except (OSError, asyncio.IncompleteReadError) as error:
            raise ServerUnreachable(self.client.url, f"it broke off: {_reason(error)}") from error
        except ValueError as error:
            raise NotHttp(self.client.url) from error
        finally:
            self._leave(whole and self.headers.get("connection", "").lower() != "close")

    async def lines(self) -> AsyncIterator[bytes]:
        """The body's lines without their ends, as they come."""
        rest = b""
        chunks = self.chunks()
        try:
            async for chunk in chunks:
                *complete, rest = (rest + chunk).split(b"\n")
                for line in complete:
                    yield line.rstrip(b"\r")
            if rest:
                yield rest
        finally:
            await chunks.aclose()  # type: ignore[attr-defined]

    def close(self) -> None:
        """Give the answer up."""
        self._leave(False)

    def _leave(self, again: bool) -> None:
        connection, self.connection = self.connection, None
        if connection is None:
            return
        if again:
            self.client._release(connection)
        else:
            connection.writer.close()


async def _line(reader: asyncio.StreamReader) -> bytes:
    line = await reader.readline()
    if not line.endswith(b"\n"):
        raise asyncio.IncompleteReadError(line, None)
    return line


def _reason(error: BaseException) -> str:
    if isinstance(error, TimeoutError):
        return f"no connection within {_CONNECT_SECONDS:.0f} s"
    if isinstance(error, asyncio.IncompleteReadError):
        return "the connection was closed"
    strerror = getattr(error, "strerror", None)
    return strerror or str(error) or type(error).__name__
