"""Bad input gets a 4xx in OpenAI's shape that names the field; the server lives and the engine holds nothing."""

import asyncio
import json
import socket
import time
from typing import Any

import httpx
import openai
import pytest

from compilerllm.errors import InvalidParameter
from compilerllm.server.config import ServerConfig
from compilerllm.server.errors import PortInUse
from compilerllm.server.run import bind, listen
from compilerllm.text.tokenizer import Tokenizer
from tests.server.conftest import Live, Start

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "hello"}]


def check_error(
    answer: httpx.Response, status: int, code: str | None, param: str | None, words: str = ""
) -> None:
    assert answer.status_code == status, answer.text
    body = answer.json()
    assert set(body) == {"error"} and set(body["error"]) == {"message", "type", "param", "code"}
    error = body["error"]
    assert (error["code"], error["param"]) == (code, param), error
    assert words.lower() in error["message"].lower() and "Traceback" not in error["message"]


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"temperature": -1}, "temperature", "at least 0"),
        ({"temperature": "hot"}, "temperature", "number"),
        ({"temperature": 1e9}, "temperature", "at most 100"),
        ({"top_p": 0}, "top_p", "above 0"),
        ({"top_p": 1.5}, "top_p", "at most 1"),
        ({"top_k": -2}, "top_k", "at least -1"),
        ({"top_k": 1.5}, "top_k", "whole number"),
        ({"min_p": 2}, "min_p", "at most 1"),
        ({"max_tokens": 0}, "max_tokens", "at least 1"),
        ({"max_tokens": -5}, "max_tokens", "at least 1"),
        ({"max_tokens": "many"}, "max_tokens", "whole number"),
        ({"max_tokens": 10**30}, "max_tokens", ""),
        ({"n": 0}, "n", "at least 1"),
        ({"n": 129}, "n", "at most 128"),
        ({"n": True}, "n", "whole number"),
        ({"min_tokens": -1}, "min_tokens", "at least 0"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens", "larger than max_tokens"),
        ({"presence_penalty": 3}, "presence_penalty", "at most 2"),
        ({"frequency_penalty": -3}, "frequency_penalty", "at least -2"),
        ({"repetition_penalty": 0}, "repetition_penalty", "above 0"),
        ({"seed": "x"}, "seed", "whole number"),
        ({"stop": 5}, "stop", "expected a text or a list, got a whole number"),
        ({"stop": [""]}, "stop", "non-empty"),
        ({"stop": ["a", 1]}, "stop[1]", "text"),
        ({"stop_token_ids": [-1]}, "stop_token_ids", "non-negative"),
        ({"stop_token_ids": [10**6]}, "stop_token_ids", "1000000"),
        ({"logit_bias": {"x": 1}}, "logit_bias", "token ids"),
        ({"logit_bias": {"5": 101}}, "logit_bias", "-100 to 100"),
        ({"logit_bias": {"99999": 1}}, "logit_bias", "99999"),
        ({"stream": "yes"}, "stream", "true or false"),
        ({"stream_options": 5}, "stream_options", "expected an object"),
        ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage", "true or false"),
        ({"ignore_eos": "x"}, "ignore_eos", "true or false"),
        ({"cache_salt": 1}, "cache_salt", "text"),
    ],
)
@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_values(live: Live, path: str, fields: dict[str, Any], param: str, words: str) -> None:
    start = {"messages": MESSAGES} if path == CHAT else {"prompt": "hello"}
    answer = live.post(path, **{**start, **fields})
    code = "context_length_exceeded" if fields.get("max_tokens") == 10**30 else "invalid_value"
    if code == "context_length_exceeded":
        param = answer.json()["error"]["param"]
    check_error(answer, 400, code, param, words)


@pytest.mark.parametrize(
    ("path", "fields", "param", "words"),
    [
        (CHAT, {"messages": []}, "messages", "non-empty"),
        (CHAT, {"messages": "hi"}, "messages", "list"),
        (CHAT, {}, "messages", "missing required field"),
        (CHAT, {"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role", "robot"),
        (CHAT, {"messages": [{"role": "user", "content": {"a": 1}}]}, "messages[0].content", "text"),
        (CHAT, {"messages": MESSAGES, "max_completion_tokens": 0}, "max_completion_tokens", "at least 1"),
        (CHAT, {"messages": MESSAGES, "logprobs": 3}, "logprobs", "true or false"),
        (CHAT, {"messages": MESSAGES, "top_logprobs": 3}, "top_logprobs", "needs logprobs"),
        (CHAT, {"messages": MESSAGES, "logprobs": True, "top_logprobs": 21}, "top_logprobs", "0 to 20"),
        (
            CHAT,
            {"messages": MESSAGES, "continue_final_message": True},
            "continue_final_message",
            "exclude each other",
        ),
        (TEXT, {}, "prompt", "missing required field"),
        (TEXT, {"prompt": ""}, "prompt", "empty"),
        (TEXT, {"prompt": []}, "prompt", "empty list"),
        (TEXT, {"prompt": [[]]}, "prompt", "empty"),
        (TEXT, {"prompt": [1, "a"]}, "prompt", "'a'"),
        (TEXT, {"prompt": [1, -1]}, "prompt", "-1"),
        (TEXT, {"prompt": [1, 1.5]}, "prompt", "1.5"),
        (TEXT, {"prompt": [1, True]}, "prompt", "True"),
        (TEXT, {"prompt": [99999]}, "prompt", "99999"),
        (TEXT, {"prompt": [10**12]}, "prompt", "no token id"),
        (TEXT, {"prompt": {"a": 1}}, "prompt", ""),
        (TEXT, {"prompt": ["a", {"b": 1}]}, "prompt", "unknown field 'b'"),
        (TEXT, {"prompt": ["a"] * 1025}, "n", "1025"),
        (TEXT, {"prompt": "x", "logprobs": 21}, "logprobs", "at most 20"),
        (TEXT, {"prompt": "x", "logprobs": -1}, "logprobs", "at least 0"),
    ],
)
def test_shapes(live: Live, path: str, fields: dict[str, Any], param: str, words: str) -> None:
    check_error(live.post(path, **fields), 400, "invalid_value", param, words)


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"temprature": 1}, "temprature", "did you mean temperature?"),
        ({"zzz": 1}, "zzz", "Unknown field 'zzz'"),
        ({"watermarking": True}, "watermarking", "not supported yet"),
        (
            {"thinking_token_budget": 5},
            "thinking_token_budget",
            "needs a model whose thoughts are told apart",
        ),
    ],
)
@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_fields_are_refused_by_name(
    live: Live, path: str, fields: dict[str, Any], param: str, words: str
) -> None:
    start = {"messages": MESSAGES} if path == CHAT else {"prompt": "hello"}
    check_error(live.post(path, **start, **fields), 400, "unknown_parameter", param, words)


@pytest.mark.parametrize(
    ("path", "fields", "param", "words"),
    [
        (TEXT, {"tools": [{"type": "function"}]}, "tools", "not supported yet"),
        (CHAT, {"tools": [{}]}, "tools[0].function", "an object with a name"),
        (CHAT, {"tools": [{"function": {"name": ""}}]}, "tools[0].function.name", "1 to 64"),
        (CHAT, {"tools": [{"type": "web_search"}]}, "tools[0]", "other kinds"),
        (
            CHAT,
            {"tools": [{"function": {"name": "f", "parameters": 3}}]},
            "tools[0].function.parameters",
            "JSON schema",
        ),
        (CHAT, {"tools": [{"function": {"name": "f"}}] * 2}, "tools[1].function.name", "another tool"),
        (CHAT, {"tool_choice": "required"}, "tool_choice", "there are no tools"),
        (CHAT, {"tool_choice": "maybe"}, "tool_choice", "must be"),
        (
            CHAT,
            {"tool_choice": {"type": "function", "function": {"name": "g"}}},
            "tool_choice.function.name",
            "'g'",
        ),
        (CHAT, {"response_format": {"type": "xml"}}, "response_format.type", "must be text"),
        (CHAT, {"response_format": {"type": "json_schema"}}, "response_format.json_schema", "schema"),
        (TEXT, {"structured_outputs": {}}, "structured_outputs", "must have one of"),
        (TEXT, {"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs", "has 2"),
        (TEXT, {"structured_outputs": {"jason": {}}}, "structured_outputs.jason", "unknown member"),
        (TEXT, {"structured_outputs": {"choice": []}}, "structured_outputs.choice", "non-empty"),
        (
            TEXT,
            {"guided_regex": "a", "response_format": {"type": "json_object"}},
            "structured_outputs",
            "leave one out",
        ),
    ],
)
def test_forms_and_tools_are_checked(
    live: Live, path: str, fields: dict[str, Any], param: str, words: str
) -> None:
    start = {"messages": MESSAGES} if path == CHAT else {"prompt": "hello"}
    code = "unknown_parameter" if words == "not supported yet" else "invalid_value"
    check_error(live.post(path, **start, **fields), 400, code, param, words)


def test_what_asks_for_nothing_is_taken(live: Live) -> None:
    nothing = {"tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "echo": False, "best_of": 1,
               "user": "u", "metadata": {"a": "b"}, "store": True, "service_tier": "auto", "logit_bias": None,
               "stop": None, "seed": None, "logprobs": None, "parallel_tool_calls": True}  # fmt: skip
    assert live.post(CHAT, messages=MESSAGES, max_tokens=1, **nothing).status_code == 200


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"nonsense",
        b"[1]",
        b'"text"',
        b"null",
        b'{"messages": NaN}',
        b'{"prompt": "\xff\xfe"}',
        b"\xff\xfe{}",
        b'{"prompt": "\\ud800"}',
        b'{"prompt": ' + b"[" * 100_000,
        b'{"temperature": 1e999}',
    ],
)
@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_bodies_that_are_no_json_object(live: Live, path: str, body: bytes) -> None:
    answer = live.http.post(path, content=body, headers={"content-type": "application/json"})
    check_error(answer, 400, "malformed_body", None, "body")


def test_a_prompt_that_is_too_long(live: Live) -> None:
    check_error(live.post(TEXT, prompt="x" * 600), 400, "context_length_exceeded", "prompt", "512 tokens")
    check_error(live.post(CHAT, messages=[{"role": "user", "content": "q " * 600}]), 400,
                "context_length_exceeded", "messages", "512 tokens")  # fmt: skip
    check_error(
        live.post(TEXT, prompt="x", max_tokens=512), 400, "context_length_exceeded", "prompt", "asks for 512"
    )
    whole = live.post(
        CHAT, messages=[{"role": "user", "content": "ab"}]
    ).json()  # no limit: to the context's end
    assert whole["usage"]["total_tokens"] == 512


def test_a_prompt_so_long_that_it_is_not_encoded(
    live: Live, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def encode(self: Tokenizer, text: str, add_special_tokens: bool = True) -> list[int]:
        raise AssertionError("encoding megabytes keeps a thread busy for seconds")

    monkeypatch.setattr(Tokenizer, "encode", encode)
    text = "x y " * 500_000
    check_error(live.post(TEXT, prompt=text), 400, "context_length_exceeded", "prompt", "has at least")
    messages = [{"role": "user", "content": text}]
    check_error(
        live.post(CHAT, messages=messages), 400, "context_length_exceeded", "messages", "has at least"
    )


def test_a_body_that_is_too_large(start: Start) -> None:
    live = start({"max_body_bytes": 2048})
    check_error(live.post(TEXT, prompt="x" * 3000), 413, "request_too_large", None, "2048 bytes")
    unannounced = live.http.post(TEXT, content=iter([b'{"prompt": "', b"x" * 3000, b'"}']))
    check_error(unannounced, 413, "request_too_large", None, "2048 bytes")
    assert live.post(TEXT, prompt="x", max_tokens=1).status_code == 200


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/nothing", 404, "not_found"),
        ("GET", "/v1/models/other", 404, "model_not_found"),
        ("GET", "/v1/models/", 404, "model_not_found"),
        ("GET", CHAT, 405, "method_not_allowed"),
        ("DELETE", "/health", 405, "method_not_allowed"),
        ("POST", "/v1/images/generations", 404, "not_found"),
    ],
)
def test_routes(live: Live, method: str, path: str, status: int, code: str) -> None:
    answer = live.http.request(method, path)
    check_error(answer, status, code, answer.json()["error"]["param"])


def test_the_sdk_sees_its_own_error_classes(live: Live) -> None:
    with pytest.raises(openai.NotFoundError, match="'fake'"):
        live.client.chat.completions.create(model="gpt-9", messages=[{"role": "user", "content": "x"}])
    with pytest.raises(openai.BadRequestError) as caught:
        live.client.completions.create(model="fake", prompt="x" * 600)
    assert caught.value.code == "context_length_exceeded"


def test_api_key(start: Start) -> None:
    live = start({"api_key": ("sécret",)})
    for sent in (None, "Bearer wrong", "sécret", "Bearer", "Basic sécret"):
        headers = {} if sent is None else {b"authorization": sent.encode()}
        answer = live.http.get("/v1/models", headers=headers)
        check_error(answer, 401, "invalid_api_key", None, "Bearer")
    right = {b"authorization": "bearer sécret".encode()}
    assert live.http.get("/v1/models", headers=right).status_code == 200
    assert live.http.get("/health").status_code == 200 and live.http.get("/metrics").status_code == 200
    with pytest.raises(openai.AuthenticationError):
        live.client.models.list()


def test_a_full_queue(start: Start) -> None:
    live = start(max_open_requests=2, step_seconds=0.02)
    check_error(live.post(TEXT, prompt=["a", "b", "c"]), 429, "queue_full", None, "--max-num-waiting")
    assert live.engine.num_open == 0, "the part of a refused request that was taken must be given back"
    assert live.post(TEXT, prompt=["a", "b"], max_tokens=1).status_code == 200


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_hangs_up(start: Start, path: str, stream: bool) -> None:
    live = start(step_seconds=0.02)
    start_fields = {"messages": MESSAGES} if path == CHAT else {"prompt": "hello"}
    body = json.dumps({**start_fields, "stream": stream, "n": 2, "max_tokens": 400}).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    host, port = live.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(head.encode() + body)
        live.wait_until(lambda: live.engine.num_open == 2)
        if stream:
            assert connection.recv(100)
    live.wait_until(lambda: live.engine.num_open == 0, 1.0)
    assert len(live.engine.aborted) == 2
    assert live.http.get("/health").status_code == 200
    assert 'finished_reason="abort",model_name="fake"} 2.0' in live.http.get("/metrics").text


def test_an_offer_to_speak_http_2_keeps_its_body(live: Live) -> None:
    """Java's client makes it with every request; some parsers then take the body for the other protocol's."""
    body = json.dumps({"prompt": "hello", "max_tokens": 2}).encode()
    upgrade = "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAA\r\n"
    head = f"POST {TEXT} HTTP/1.1\r\nHost: x\r\n{upgrade}Content-Length: {len(body)}\r\n\r\n"
    host, port = live.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(head.encode() + body)
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 200")


def test_a_client_that_hangs_up_before_its_body_is_whole(
    live: Live, caplog: pytest.LogCaptureFixture
) -> None:
    host, port = live.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(f'POST {TEXT} HTTP/1.1\r\nHost: x\r\nContent-Length: 900\r\n\r\n{{"pro'.encode())
        time.sleep(0.1)
    time.sleep(0.1)
    assert live.http.get("/health").status_code == 200
    assert "Traceback" not in caplog.text and "failed" not in caplog.text


def test_the_engine_dies_in_mid_stream_and_comes_back(start: Start) -> None:
    live = start(step_seconds=0.02)
    stream = live.client.chat.completions.create(
        model="fake", messages=[{"role": "user", "content": "abab"}], stream=True, max_tokens=400
    )
    for i, _ in enumerate(stream):
        if i == 3:
            live.engine.die()
            break
    with pytest.raises(openai.APIError, match="engine process died"):
        for _ in stream:
            pass
    assert live.http.get("/health").status_code == 503
    check_error(live.post(CHAT, messages=MESSAGES), 503, "engine_unavailable", None, "engine is not running")
    live.engine.revive()
    assert live.http.get("/health").status_code == 200
    assert live.post(CHAT, messages=MESSAGES, max_tokens=1).status_code == 200


def test_the_engine_dies_under_a_whole_answer(start: Start) -> None:
    live = start(step_seconds=0.02)

    async def ask() -> httpx.Response:
        async with httpx.AsyncClient(base_url=live.url) as http:
            asking = asyncio.create_task(http.post(CHAT, json={"messages": MESSAGES, "n": 2}))
            while live.engine.num_open < 2:
                await asyncio.sleep(0.01)
            live.engine.die()
            return await asking

    check_error(asyncio.run(ask()), 500, "generation_failed", None, "engine process died")


def test_a_streamed_error_ends_the_stream_as_events(start: Start) -> None:
    live = start(step_seconds=0.02)
    with live.http.stream("POST", CHAT, json={"messages": MESSAGES, "stream": True}) as answer:
        lines = []
        for line in answer.iter_lines():
            lines.append(line)
            if len(lines) == 6:
                live.engine.die()
    events = [line.removeprefix("data: ") for line in lines if line]
    assert events[-1] == "[DONE]"
    assert json.loads(events[-2])["error"]["code"] == "generation_failed"


def test_a_bug_is_answered_without_its_details(
    start: Start, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    live = start()

    def broken(_: Any) -> None:
        raise ZeroDivisionError("secret detail")

    monkeypatch.setattr(live.engine, "submit", broken)
    answer = live.post(CHAT, messages=MESSAGES)
    check_error(answer, 500, "internal_error", None, "log says more")
    assert "secret" not in answer.text and "secret detail" in caplog.text
    assert live.http.get("/health").status_code == 200


def test_a_port_in_use() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(PortInUse, match=f"127.0.0.1:{port}: Address already in use.*--port"):
            bind(ServerConfig(port=port))
    with pytest.raises(PortInUse, match=r"nowhere\.invalid"):
        bind(ServerConfig(host="nowhere.invalid"))


def test_a_port_that_another_server_took_while_both_loaded() -> None:
    with bind(ServerConfig(port=0)) as first:
        config = ServerConfig(port=first.getsockname()[1])
        with bind(config) as second:  # neither listens yet
            listen(first, config)
            with pytest.raises(PortInUse, match="already in use"):
                listen(second, config)


@pytest.mark.parametrize(
    "wrong", [{"port": 70000}, {"api_key": (" ",)}, {"tokenizer_threads": 0}, {"max_body_bytes": 1}]
)
def test_flags_out_of_range(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidParameter, match="--" + next(iter(wrong)).replace("_", "-")):
        ServerConfig(**wrong)
