"""What the server tells of its work: ids, the access log, the request log, the stats line, traces."""

import asyncio
import json
import logging
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from compilerllm.runtime.messages import Stats
from compilerllm.server.config import ServerConfig
from compilerllm.server.errors import CannotWriteRequestLog, TracingNotInstalled
from compilerllm.server.records import RequestIdFilter, RequestRecord, begin_record, choose_request_id
from compilerllm.server.request_log import RequestLog, redact
from compilerllm.server.run import check_files
from compilerllm.server.stats_line import log_stats, stats_line
from compilerllm.server.streams import EngineStreams
from compilerllm.server.tracing import Tracing, open_tracing
from compilerllm.text.tokenizer import Tokenizer
from tests.server.conftest import Live, Start, serve
from tests.server.fake_engine import FakeEngine

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
SECRET = "my bank account is 12345"


def entries(path: Path, number: int) -> list[dict[str, Any]]:
    """The first ``number`` lines, which a thread writes."""
    end = time.monotonic() + 5
    while not path.exists() or len(path.read_text().splitlines()) < number:
        assert time.monotonic() < end, "the lines did not come"
        time.sleep(0.01)
    return [json.loads(line) for line in path.read_text().splitlines()]


def chat(live: Live, **fields: Any) -> httpx.Response:
    headers = {"X-Request-Id": "req-7", "Authorization": "Bearer key-of-mine"}
    body = {"messages": [{"role": "user", "content": SECRET}], "max_tokens": 8, **fields}
    return live.http.post(CHAT, json=body, headers=headers)


# -- ids and the access log ---------------------------------------------------------------------------------------


def test_every_answer_has_an_id(start: Start) -> None:
    live = start({"api_key": ("k",)})
    for path, key, status in (
        ("/health", "", 200),
        ("/v1/models", "k", 200),
        ("/v1/models", "", 401),
        ("/no", "k", 404),
    ):
        answer = live.http.get(path, headers={"X-Request-Id": "mine-1", "x-api-key": key or "-"})
        assert (answer.status_code, answer.headers["x-request-id"]) == (status, "mine-1")
    new = [live.http.get("/health").headers["x-request-id"] for _ in range(2)]
    assert len({*new}) == 2 and all(len(name) == 32 for name in new)


@pytest.mark.parametrize("sent", [b"", b"a b", b"x" * 129, b"a\nforged line", "é".encode()])
def test_an_id_that_is_unfit_for_logs_is_replaced(sent: bytes) -> None:
    assert choose_request_id(sent) != sent.decode() and len(choose_request_id(sent)) == 32


def test_a_line_of_the_log_ends_with_the_request_s_id() -> None:
    line = logging.LogRecord("x", logging.INFO, "", 0, "took %d s", (3,), None)
    shown = RequestIdFilter()

    async def in_a_request() -> None:
        begin_record(RequestRecord("req-1", "GET", "/", "-"))
        assert shown.filter(line) and shown.filter(line)

    asyncio.run(in_a_request())
    assert line.getMessage() == "took 3 s [req-1]"


def test_the_access_log_leaves_out_probes_and_forged_lines(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "compilerllm.access")
    live = start({"access_log": True})
    live.http.get("/health")
    live.http.get("/v1/models")
    live.http.get("/v1/no%0aINFO: forged")
    live.wait_until(lambda: len(caplog.messages) >= 2)
    assert (
        '"GET /v1/models" 200' in caplog.messages[0]
        and '"GET /v1/no\\nINFO: forged" 404' in caplog.messages[1]
    )
    assert not any("/health" in message or "\n" in message for message in caplog.messages)


# -- the request log ----------------------------------------------------------------------------------------------


def test_no_request_is_logged_unless_asked_for(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    chat(start())
    assert SECRET not in caplog.text


def test_metadata_has_no_text(start: Start, tmp_path: Path) -> None:
    file = tmp_path / "log"
    live = start({"log_requests": "metadata", "request_log": str(file), "api_key": ("key-of-mine",)})
    usage = chat(live, temperature=0.5, stop=["bank"]).json()["usage"]
    live.http.get("/health")
    assert live.http.get("/v1/models").status_code == 401
    whole, refused = entries(file, 2)
    text = file.read_text()
    assert "bank" not in text and "key-of-mine" not in text and file.stat().st_mode & 0o77 == 0
    assert whole["request_id"] == "req-7" and whole["path"] == CHAT and whole["status"] == 200
    assert whole["request"] == {
        "messages": "<1 items>",
        "max_tokens": 8,
        "temperature": 0.5,
        "stop": "<1 items>",
    }
    assert {name: whole[name] for name in ("prompt_tokens", "completion_tokens")} == {
        name: usage[name] for name in ("prompt_tokens", "completion_tokens")
    }
    assert whole["finish_reasons"] == {"stop": 1} and len(whole["key"]) == 8 and "response" not in whole
    assert 0 <= whole["first_token_seconds"] <= whole["seconds"]
    assert refused["status"] == 401 and refused["key"] is None and refused["request"] is None


@pytest.mark.parametrize("stream", [False, True])
def test_full_has_both_bodies(start: Start, tmp_path: Path, stream: bool) -> None:
    file = tmp_path / "log"
    live = start({"log_requests": "full", "request_log": str(file)})
    answer = chat(live, stream=stream)
    (entry,) = entries(file, 1)
    assert entry["request"]["messages"][0]["content"] == SECRET and "key-of-mine" not in file.read_text()
    assert entry["response"] == (answer.text if stream else answer.json())


def test_full_keeps_no_more_than_it_may(start: Start, tmp_path: Path) -> None:
    file = tmp_path / "log"
    live = start({"log_requests": "full", "request_log": str(file), "request_log_bytes": 10})
    chat(live)
    (entry,) = entries(file, 1)
    assert entry["request"].startswith('{"messages') and "cut off" in entry["request"]
    assert entry["request_bytes"] > 10 and len(entry["response"]) < 40


def test_what_is_no_json_is_still_an_entry(start: Start, tmp_path: Path) -> None:
    file = tmp_path / "log"
    live = start({"log_requests": "metadata", "request_log": str(file)})
    for body in (b"{", b"\xff\xfe", b"[" * 5000, b"", b'{"' + b"a" * 300 + b'": 1}'):
        live.http.post(TEXT, content=body)
    assert [e["status"] for e in entries(file, 5)] == [400] * 5
    assert "aaa" not in file.read_text()


def test_the_request_log_is_opened_anew(tmp_path: Path) -> None:
    file = tmp_path / "log"
    log = RequestLog(ServerConfig(log_requests="metadata", request_log=str(file)))
    record = RequestRecord("a", "GET", "/", "-")
    log.write(record, log.keep_request(), log.keep_response())
    entries(file, 1)
    file.rename(tmp_path / "log.1")
    log.reopen()
    log.write(RequestRecord("b", "GET", "/", "-"), log.keep_request(), log.keep_response())
    log.close()
    assert [e["request_id"] for e in entries(file, 1)] == ["b"]
    assert [e["request_id"] for e in entries(tmp_path / "log.1", 1)] == ["a"]
    with pytest.raises(CannotWriteRequestLog, match="--request-log"):
        check_files(ServerConfig(log_requests="full", request_log=str(tmp_path / "no" / "log")))


def test_redaction_keeps_numbers_and_switches_alone() -> None:
    body = {
        "model": "m",
        "user": "me",
        "n": 2,
        "stream": True,
        "tools": [1],
        "metadata": {"a": 1},
        "my secret": 1,
    }
    assert redact(body) == {
        "model": "m",
        "user": "<2 characters>",
        "n": 2,
        "stream": True,
        "tools": "<1 items>",
        "metadata": "<1 items>",
        "<a name>": 1,
    }
    assert redact("my secret") == "<9 characters>"


# -- the stats line -----------------------------------------------------------------------------------------------


def test_the_stats_line() -> None:
    before = Stats(steps=10, prompt_tokens=100, generation_tokens=50, prefix_queries=10, prefix_hits=10)
    now = Stats(
        steps=20,
        prompt_tokens=300,
        generation_tokens=150,
        prefix_queries=210,
        prefix_hits=60,
        num_running=3,
        num_waiting=2,
        blocks_used=16,
        blocks_total=64,
        num_preemptions=1,
    )
    assert stats_line(before, now, 10.0) == (
        "Prompt 20.0 tokens/s, generation 10.0 tokens/s; running 3, waiting 2; KV cache 25.0%, prefix hits 25%, preempted 1"
    )
    assert stats_line(before, before, 10.0) is None, "quiet when idle"
    restarted = Stats(steps=1, prompt_tokens=10, generation_tokens=1, num_running=1)
    line = stats_line(before, restarted, 1.0)
    assert line is not None and line.startswith("Prompt 10.0 tokens/s, generation 1.0")


def test_the_stats_line_comes_while_there_is_work(
    tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "compilerllm.server")

    async def check() -> None:
        streams = EngineStreams(FakeEngine(vocab_size=tokenizer.vocab_size))
        task = asyncio.create_task(log_stats(streams, 0.01))
        await asyncio.sleep(0.1)
        assert not caplog.messages
        streams.stats = Stats(steps=1, num_running=1)
        while not caplog.messages:
            await asyncio.sleep(0.01)
        task.cancel()

    asyncio.run(check())
    assert "running 1" in caplog.messages[0]


# -- traces -------------------------------------------------------------------------------------------------------


def test_a_span_for_each_request(tokenizer: Tokenizer) -> None:
    kept = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(kept))
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    engine = FakeEngine(vocab_size=tokenizer.vocab_size)
    with serve(tokenizer, ServerConfig(port=0), engine, tracing=Tracing(provider, "fake")) as live:
        live.http.get("/health")
        body = {
            "prompt": "hello",
            "max_tokens": 4,
            "n": 2,
            "temperature": 0.5,
            "ignore_eos": True,
        }
        answer = live.http.post(TEXT, json=body, headers={"traceparent": parent, "X-Request-Id": "req-7"})
        live.http.post(TEXT, json={"prompt": ""})
        live.wait_until(lambda: len(kept.get_finished_spans()) == 2)
    span, refused = kept.get_finished_spans()
    assert span.name == "llm_request" and span.kind.name == "SERVER"
    assert span.context is not None and span.parent is not None
    assert f"{span.context.trace_id:032x}" == parent.split("-")[1]
    assert f"{span.parent.span_id:016x}" == parent.split("-")[2]
    found = dict(span.attributes or {})
    assert {name: found[name] for name in found if "latency" not in name} == {
        "http.request.method": "POST",
        "url.path": TEXT,
        "http.response.status_code": 200,
        "gen_ai.request.id": "req-7",
        "gen_ai.request.n": 2,
        "gen_ai.request.max_tokens": 4,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.response.model": "fake",
        "gen_ai.response.finish_reasons": ("length",),
        "gen_ai.usage.num_sequences": 2,
        "gen_ai.usage.prompt_tokens": answer.json()["usage"]["prompt_tokens"],
        "gen_ai.usage.completion_tokens": 8,
    }
    latencies = {name.rpartition(".")[2] for name in found if name.startswith("gen_ai.latency.")}
    assert latencies == {
        *("e2e", "time_to_first_token", "time_in_queue"),
        *("time_in_model_prefill", "time_in_model_decode", "time_in_model_inference"),
    }
    assert 0 < found["gen_ai.latency.time_to_first_token"] <= found["gen_ai.latency.e2e"]  # type: ignore[operator]
    assert span.start_time is not None and span.end_time is not None
    event = span.events[0]
    assert event.name == "first_token" and span.start_time <= event.timestamp <= span.end_time
    assert (refused.attributes or {})["http.response.status_code"] == 400 and refused.parent is None


def test_spans_reach_a_collector() -> None:
    """Over HTTP, as OTLP's protobuf; what still waits is sent at the end."""
    got: list[tuple[str, bytes]] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            got.append((self.path, self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            return None

    with HTTPServer(("127.0.0.1", 0), Collector) as collector:
        thread = threading.Thread(target=collector.serve_forever)
        thread.start()
        tracing = open_tracing(f"http://127.0.0.1:{collector.server_port}/v1/traces", "fake")
        record = RequestRecord("req-7", "POST", TEXT, "-")
        record.ended = record.arrived + 1.5
        tracing.record(record, [])
        tracing.close()
        collector.shutdown()
        thread.join()
    ((path, body),) = got
    sent = ExportTraceServiceRequest.FromString(body).resource_spans[0]
    (span,) = sent.scope_spans[0].spans
    assert path == "/v1/traces" and span.name == "llm_request"
    assert span.end_time_unix_nano - span.start_time_unix_nano == pytest.approx(1.5e9, rel=1e-6)
    assert {a.key: a.value.string_value for a in sent.resource.attributes}["service.name"] == "compilerllm"


def test_traces_without_their_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(TracingNotInstalled, match=r"compilerllm\[tracing\]"):
        check_files(ServerConfig(otlp_traces_endpoint="http://127.0.0.1:1/v1/traces"))
