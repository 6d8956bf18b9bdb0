"""How much a client can take: requests at once, slow bodies and headers, streams that nobody reads; and the drain."""

import asyncio
import json
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from compilerllm.errors import InvalidParameter
from compilerllm.runtime.messages import Delta, Request
from compilerllm.sampling_params import SamplingParams
from compilerllm.server.config import ServerConfig
from compilerllm.server.errors import ClientTooSlow
from compilerllm.server.limits import MAX_HEADERS
from compilerllm.server.streams import EngineStreams
from compilerllm.text.tokenizer import Tokenizer
from tests.server.conftest import Live, Start
from tests.server.fake_engine import FakeEngine

TEXT = "/v1/completions"
PROBES = ("/health", "/ping", "/ready", "/readyz", "/live", "/livez", "/version", "/load", "/metrics")


@contextmanager
def connected(live: Live, sent: bytes = b"") -> Iterator[socket.socket]:
    host, port = live.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as client:
        client.sendall(sent)
        yield client


def read_all(client: socket.socket) -> bytes:
    """Until the server closes; b"" if it cut the connection."""
    received = bytearray()
    try:
        while part := client.recv(65536):
            received += part
    except ConnectionResetError:
        pass
    return bytes(received)


def refusal(answer: bytes) -> tuple[int, str]:
    """Status and code of a refusal as it came over the wire, in OpenAI's shape."""
    head, _, body = answer.partition(b"\r\n\r\n")
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["message"]
    return int(head.split()[1]), error["code"]


def head_of(size: int, path: str = TEXT) -> bytes:
    return f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {size}\r\n\r\n".encode()


@contextmanager
def streaming(live: Live, **body: object) -> Iterator[Iterator[str]]:
    """A stream that has begun."""
    with live.http.stream("POST", TEXT, json={"prompt": "hello", "stream": True, **body}) as answer:
        lines = answer.iter_lines()
        next(lines)
        yield lines


@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_a_streamed_answer_is_framed_as_its_client_understands(live: Live, version: str) -> None:
    """Chunks for HTTP/1.1, all the same whichever way they were sent; the bare events for HTTP/1.0."""
    body = json.dumps({"prompt": "hello", "stream": True, "max_tokens": 5, "ignore_eos": True}).encode()
    head = (
        f"POST {TEXT} HTTP/{version}\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    with connected(live, head.encode() + body) as client:
        _, _, answer = read_all(client).partition(b"\r\n\r\n")
    if version == "1.1":
        chunks = answer
        answer = b""
        while chunks != b"0\r\n\r\n":
            size, _, rest = chunks.partition(b"\r\n")
            length = int(size, 16)
            answer, chunks = answer + rest[:length], rest[length + 2 :]
    *events, done, end = answer.split(b"\n\n")
    assert done == b"data: [DONE]" and end == b"" and len(events) >= 2
    parts = [json.loads(event.removeprefix(b"data: ")) for event in events]
    assert parts[-1]["choices"][0]["finish_reason"] == "length"


def test_more_requests_at_once_than_allowed(start: Start) -> None:
    live = start({"max_concurrent_requests": 2}, step_seconds=0.02)
    with streaming(live, max_tokens=300), streaming(live, max_tokens=300):
        assert live.http.get("/load").json() == {"server_load": 2}
        refused = live.post(TEXT, prompt="x")
        assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["code"] == "too_many_requests"
        assert live.http.get("/health").status_code == 200  # probes are not counted
    live.wait_until(lambda: live.http.get("/load").json() == {"server_load": 0})
    assert live.post(TEXT, prompt="x", max_tokens=1).status_code == 200
    assert (
        'compilerllm:admission_rejections_total{engine="0",model_name="fake"} 1.0'
        in live.http.get("/metrics").text
    )


def test_a_body_that_comes_too_slowly(start: Start) -> None:
    live = start({"body_timeout": 0.3})
    with connected(live, head_of(100)) as client:
        for _ in range(20):  # a byte now and then keeps nothing open
            try:
                client.sendall(b" ")
            except OSError:
                break
            time.sleep(0.05)
        assert refusal(read_all(client)) == (408, "body_timeout")
    live.wait_until(lambda: live.http.get("/load").json() == {"server_load": 0})


def test_the_time_of_a_body_is_not_that_of_the_answer(start: Start) -> None:
    live = start({"body_timeout": 0.3}, step_seconds=0.05)
    assert (
        live.post(TEXT, prompt="x", max_tokens=12, ignore_eos=True).json()["usage"]["completion_tokens"] == 12
    )


@pytest.mark.parametrize("sent", [b"", b"GET /health HTTP/1.1\r\nHost:"])
def test_headers_that_do_not_come(start: Start, sent: bytes) -> None:
    """Also those of a second request on a connection."""
    live = start({"header_timeout": 0.3})
    with connected(live, sent) as client:
        assert read_all(client) == b""
    with connected(live, b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n") as client:
        assert client.recv(65536).startswith(b"HTTP/1.1 200")
        client.sendall(b"GET /he")
        assert read_all(client) == b""
    assert live.http.get("/health").status_code == 200


def test_headers_that_are_too_large_or_too_many_or_none(start: Start) -> None:
    live = start({"max_header_bytes": 4096})
    for number, size, expected in (
        (1, 100_000, (431, "headers_too_large")),
        (MAX_HEADERS + 1, 1, (431, "headers_too_large")),
    ):
        lines = "".join(f"a{i}: {'x' * size}\r\n" for i in range(number))
        with connected(live, f"GET /health HTTP/1.1\r\nHost: x\r\n{lines}\r\n".encode()) as client:
            assert refusal(read_all(client)) == expected
    for wrong in (b"\x16\x03\x01\x02\x00\x01\r\n\r\n", b"GET\r\n\r\n", b"GET / HTTP/1.1\r\nno colon\r\n\r\n"):
        with connected(live, wrong) as client:
            assert refusal(read_all(client)) == (400, "malformed_request")
    body = head_of(5).replace(b"Content-Length: 5", b"Transfer-Encoding: chunked") + b"zz\r\n"
    with connected(live, body) as client:
        assert refusal(read_all(client)) == (400, "malformed_request")
    assert live.http.get("/health").status_code == 200


def test_a_client_that_does_not_read_is_cut(start: Start) -> None:
    """With the engine's work for it; others are not slowed."""
    live = start({"send_timeout": 0.5}, max_model_len=20000, per_step=1)
    body = json.dumps(
        {"prompt": ["hello"] * 20, "stream": True, "max_tokens": 15000, "ignore_eos": True, "logprobs": 5}
    ).encode()
    host, port = live.url.removeprefix("http://").split(":")
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect((host, int(port)))
        client.sendall(head_of(len(body)) + body)
        live.wait_until(lambda: live.engine.num_open == 20)
        assert live.post(TEXT, prompt="x", max_tokens=3).status_code == 200
        live.wait_until(lambda: live.engine.num_open == 0, 15)
        assert len(live.engine.aborted) == 20
        live.wait_until(lambda: live.http.get("/load").json() == {"server_load": 0})


def test_a_stream_holds_no_more_steps_than_it_may(tokenizer: Tokenizer) -> None:
    """The engine's work ends as soon as there are more, whether the client ever reads or not."""

    async def check() -> None:
        engine = FakeEngine(vocab_size=tokenizer.vocab_size)
        streams = EngineStreams(engine, max_unread=3)
        streams.start()
        request = Request(
            request_id="r", prompt_token_ids=[1, 2], params=SamplingParams(max_tokens=400), arrival_time=0.0
        )
        feed = streams.submit([request])
        while engine.num_open:
            await asyncio.sleep(0)
        assert engine.aborted == ["r"] and not feed.open_ids
        with pytest.raises(ClientTooSlow, match="more than 3 steps"):
            await feed.read()
        assert await feed.read() == []
        feed.push(Delta(request_id="r", token_ids=[1]))
        assert await feed.read() == []
        await streams.stop()

    asyncio.run(check())


def test_probes(live: Live) -> None:
    for path in PROBES:
        got, head = live.http.get(path), live.http.head(path)
        assert got.status_code == head.status_code == 200 and head.content == b"", path
    assert live.http.post("/ping").status_code == 200
    assert live.http.get("/version").json().keys() == {"version"}


def test_probes_while_the_engine_is_down(start: Start) -> None:
    live = start()
    live.engine.health = "restarting"
    for path in ("/health", "/ping", "/ready", "/readyz"):
        assert live.http.get(path).status_code == 503, path
    for path in ("/live", "/livez", "/version", "/metrics"):
        assert live.http.get(path).status_code == 200, path
    live.engine.health = "dead"
    assert live.http.get("/live").status_code == 503
    live.engine.health = "ready"


def test_a_draining_server(start: Start) -> None:
    """It answers what is open and the probes, and refuses what is new."""
    live = start(step_seconds=0.01)
    with streaming(live, max_tokens=100, ignore_eos=True) as lines:
        live.app.state.gate.draining = True
        assert [live.http.get(p).status_code for p in ("/ready", "/health", "/live", "/metrics")] == [
            503,
            503,
            200,
            200,
        ]
        refused = live.post(TEXT, prompt="x")
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "shutting_down"
        assert "retry-after" in refused.headers
        assert list(lines)[-2:] == ["data: [DONE]", ""]


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_concurrent_requests": 0},
        {"body_timeout": 0.0},
        {"max_header_bytes": 10},
        {"log_level": "loud"},
        {"log_requests": "some"},
        {"request_log": "file"},
        {"otlp_traces_endpoint": "collector:4317"},
        {"stats_interval": -1.0},
    ],
)
def test_limits_that_are_none(wrong: dict[str, object]) -> None:
    with pytest.raises(InvalidParameter, match="--" + next(iter(wrong)).replace("_", "-")):
        ServerConfig(**wrong)  # type: ignore[arg-type]
