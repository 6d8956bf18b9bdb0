"""The client's HTTP against servers that say every byte themselves: framing, connections used again, what breaks."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence

import pytest

from compilerllm.errors import InvalidParameter
from compilerllm.remote.http import HttpClient, NotHttp, ServerUnreachable
from compilerllm.remote.server import RemoteServer, ServerRefused

OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"
Use = Callable[[str], Awaitable[None]]


def against(answers: Sequence[Sequence[bytes]], use: Use, *, pieces: int = 0) -> list[int]:
    """Run ``use(url)`` against a server: answers[i][j] is what connection i says to its request j, then it closes.

    pieces: send so many bytes at a time. Returns how many requests each connection got.
    """
    counts: list[int] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number = len(counts)
        counts.append(0)
        try:
            for answer in answers[number]:
                head = await reader.readuntil(b"\r\n\r\n")
                if b"Content-Length: " in head:
                    await reader.readexactly(int(head.split(b"Content-Length: ")[1].split(b"\r\n")[0]))
                counts[number] += 1
                size = pieces or max(1, len(answer))
                for at in range(0, len(answer), size):
                    writer.write(answer[at : at + size])
                    await writer.drain()
                    if pieces:
                        await asyncio.sleep(0)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the client has left
        finally:
            writer.close()

    async def main() -> None:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        async with server:
            await asyncio.wait_for(use(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"), 20)

    asyncio.run(main())
    return counts


def read_once(expected: bytes) -> Use:
    async def use(url: str) -> None:
        client = HttpClient(url)
        answer = await client.request("POST", "/x", b"{}")
        assert answer.status == 200 and await answer.read() == expected
        await client.close()

    return use


@pytest.mark.parametrize("pieces", [0, 1, 7])
@pytest.mark.parametrize(
    "answer",
    [
        OK + b"Content-Length: 5\r\n\r\nhello",
        OK + b"content-length:5\r\n\r\nhello",
        CHUNKED + b"2\r\nhe\r\n3;name=value\r\nllo\r\n0\r\n\r\n",
        CHUNKED + b"5\r\nhello\r\n0\r\nTrailer: x\r\n\r\n",
        OK + b"Connection: close\r\n\r\nhello",
        b"HTTP/1.1 100 Continue\r\n\r\n" + OK + b"Content-Length: 5\r\n\r\nhello",
    ],
    ids=["length", "spelling", "chunks", "trailer", "to the end", "continue"],
)
def test_bodies_of_every_framing(answer: bytes, pieces: int) -> None:
    assert against([[answer]], read_once(b"hello"), pieces=pieces) == [1]


def test_connections_are_used_again_and_replaced_when_the_server_closed_them() -> None:
    whole = OK + b"Content-Length: 2\r\n\r\n{}"

    async def use(url: str) -> None:
        server = RemoteServer(url)
        for _ in range(2):
            assert await server.ask("/v1/x", {}) == {}
        await asyncio.sleep(0.05)  # the server has closed the connection by now
        assert await server.ask("/v1/x", {}) == {}
        await server.close()

    assert against([[whole, whole], [whole]], use) == [2, 1]


def test_a_stream_that_is_left_closes_its_connection() -> None:
    event = CHUNKED + b'10\r\ndata: {"n": 1}\n\n\r\n'

    async def use(url: str) -> None:
        server = RemoteServer(url)
        stream = server.stream("/v1/x", {})
        answer = OK + b"Content-Type: text/event-stream\r\n"
        assert answer and await anext(stream) == {"n": 1}
        await stream.aclose()  # type: ignore[attr-defined]
        assert server.http._idle == []

    streamed = event.replace(b"Transfer", b"Content-Type: text/event-stream\r\nTransfer")
    assert against([[streamed, b""]], use)[0] == 1


@pytest.mark.parametrize(
    ("answer", "error", "says"),
    [
        (b"", ServerUnreachable, "closed"),
        (OK + b"Content-Length: 9\r\n\r\nhello", ServerUnreachable, "broke off"),
        (CHUNKED + b"5\r\nhel", ServerUnreachable, "broke off"),
        (CHUNKED + b"5\r\nhello\r\n", ServerUnreachable, "broke off"),
        (CHUNKED + b"zz\r\nhello\r\n", NotHttp, "HTTP"),
        (b"SSH-2.0-x\r\n\r\n", NotHttp, "HTTP"),
        (OK + b"Content-Length: 3\r\n\r\nhey", ServerRefused, "no JSON"),
        (b"HTTP/1.1 418 Teapot\r\nContent-Length: 5\r\n\r\nshort", ServerRefused, "418: short"),
    ],
)
def test_what_breaks_is_told(answer: bytes, error: type[Exception], says: str) -> None:
    async def use(url: str) -> None:
        with pytest.raises(error, match=says):
            await RemoteServer(url).ask("/v1/x", {})

    assert against([[answer]], use) == [1]


@pytest.mark.parametrize(
    "events",
    [[{"n": 1}, {"n": 2}], [{"n": 1}, {"error": {"message": "the engine ended"}}]],
    ids=["whole", "error"],
)
def test_events_of_a_stream(events: list[dict[str, object]]) -> None:
    text = "".join(f": a comment\n\ndata: {json.dumps(e)}\r\n\r\n" for e in events) + "data: [DONE]\n\n"
    head = OK + b"Content-Type: text/event-stream; charset=utf-8\r\nConnection: close\r\n\r\n"

    async def use(url: str) -> None:
        seen = []
        try:
            async for event in RemoteServer(url).stream("/v1/x", {}):
                seen.append(event)  # noqa: PERF401 - what came before the error counts
        except ServerRefused as error:
            assert "the engine ended" in str(error)
            seen.append(events[1])
        assert seen == events

    against([[head + text.encode()]], use, pieces=5)


@pytest.mark.parametrize("url", ["", "nothing", "ftp://x", "http://", "http://x:99999", "http://x:a"])
def test_urls_that_are_none_are_refused(url: str) -> None:
    with pytest.raises(InvalidParameter, match="--url"):
        RemoteServer(url)


def test_a_key_that_no_header_can_hold_is_refused() -> None:
    with pytest.raises(InvalidParameter, match="Authorization"):
        RemoteServer("http://x", "a\nb")


@pytest.mark.parametrize("url", ["http://h:1", "http://h:1/", "http://h:1/v1", "http://h:1/v1/"])
def test_v1_may_be_left_out(url: str) -> None:
    assert RemoteServer(url).url == "http://h:1/v1"
