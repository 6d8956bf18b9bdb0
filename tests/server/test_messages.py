"""/v1/messages by Anthropic's own client: whole and streamed, and what it refuses."""

import asyncio
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest

from compilerllm.text.tokenizer import Tokenizer
from tests.server.conftest import Live, Start
from tests.server.markup import MARKED, use_markup

TEXT = "the quick brown été 日本語 🙂🎉 fox"
TOOL: Any = {"name": "look", "description": "Look.", "input_schema": {"type": "object", "properties": {}}}


@pytest.fixture
def claude(live: Live) -> Iterator[Any]:
    with anthropic.Anthropic(base_url=live.url, api_key="none", max_retries=0, timeout=20) as client:
        yield client


def ask(client: Any, content: Any = TEXT, **options: Any) -> Any:
    given = {"model": "fake", "max_tokens": 20, "messages": [{"role": "user", "content": content}]}
    return client.messages.create(**{**given, **options})


def test_whole(claude: Any, tokenizer: Tokenizer) -> None:
    count = len(tokenizer.encode(TEXT))
    made = ask(claude, max_tokens=count)
    assert [b.type for b in made.content] == ["text"] and made.content[0].text == TEXT
    assert (made.type, made.role, made.model, made.stop_reason) == (
        "message",
        "assistant",
        "fake",
        "max_tokens",
    )
    assert made.usage.output_tokens == count and made.usage.cache_read_input_tokens == 3
    assert made.usage.input_tokens == count - 3, "cached tokens stand apart"
    ended = ask(claude, TEXT + tokenizer.named_tokens["eos_token"], max_tokens=100)
    assert ended.stop_reason == "end_turn" and ended.content[0].text == TEXT


def test_stop_sequences(claude: Any) -> None:
    made = ask(claude, max_tokens=100, stop_sequences=["n été", "zzz"])
    assert made.stop_reason == "stop_sequence" and made.stop_sequence == "n été"
    assert made.content[0].text == "the quick brow"


def test_stream(claude: Any, tokenizer: Tokenizer) -> None:
    count = len(tokenizer.encode(TEXT))
    events = list(ask(claude, max_tokens=count, stream=True))
    kinds = [e.type for e in events]
    assert kinds[:2] == ["message_start", "content_block_start"] and len(kinds) > 10
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(kinds[2:-3]) == {"content_block_delta"}
    assert "".join(e.delta.text for e in events if e.type == "content_block_delta") == TEXT
    assert events[-2].delta.stop_reason == "max_tokens" and events[-2].usage.output_tokens == count
    given: Any = {"model": "fake", "max_tokens": count, "messages": [{"role": "user", "content": TEXT}]}
    with claude.messages.stream(**given) as stream:
        assert "".join(stream.text_stream) == TEXT
        final = stream.get_final_message()
    whole = ask(claude, max_tokens=count)
    assert final.content[0].text == whole.content[0].text and final.stop_reason == whole.stop_reason
    assert final.usage.output_tokens == whole.usage.output_tokens


def test_the_raw_stream_has_named_events_and_a_ping(live: Live) -> None:
    body = {"model": "fake", "max_tokens": 2, "stream": True, "messages": [{"role": "user", "content": "hi"}]}
    text = live.post("/v1/messages", **body).text
    names = [line.removeprefix("event: ") for line in text.splitlines() if line.startswith("event: ")]
    assert names[:2] == ["message_start", "ping"] and names[-1] == "message_stop" and "[DONE]" not in text


def test_async_client(live: Live) -> None:
    async def one() -> str:
        async with anthropic.AsyncAnthropic(base_url=live.url, api_key="x", max_retries=0) as client:
            made = await client.messages.create(
                model="fake", max_tokens=8, messages=[{"role": "user", "content": "hello there"}]
            )
            block = made.content[0]
            assert block.type == "text"
            return block.text

    assert asyncio.run(one()).startswith("hello there")


def test_thoughts_and_calls_are_blocks(
    claude: Any, monkeypatch: pytest.MonkeyPatch, tokenizer: Tokenizer
) -> None:
    use_markup(monkeypatch)
    text = MARKED + tokenizer.named_tokens["eos_token"]
    made = ask(claude, text, max_tokens=200, tools=[TOOL])
    thought, said, first, second = made.content
    assert (thought.type, thought.thinking) == ("thinking", "hmm, été") and said.text == "I look."
    assert (first.type, first.name, first.input) == ("tool_use", "look", {"at": "sea"})
    assert second.input == {"at": "sky"} and second.id != first.id and made.stop_reason == "tool_use"
    given: Any = {"model": "fake", "max_tokens": 200, "messages": [{"role": "user", "content": text}]}
    with claude.messages.stream(**given, tools=[TOOL]) as stream:
        streamed = stream.get_final_message()

    def told(message: Any) -> list[Any]:
        return [b.model_dump(exclude={"id"}) for b in message.content]

    assert told(streamed) == told(made) and streamed.stop_reason == "tool_use"
    hidden = ask(claude, text, max_tokens=200, thinking={"type": "adaptive", "display": "omitted"})
    assert [b.type for b in hidden.content] == ["text", "tool_use", "tool_use"]
    cut = ask(claude, text, max_tokens=len(tokenizer.encode(MARKED)) - 8, tools=[TOOL])
    assert cut.stop_reason == "max_tokens" and isinstance(cut.content[-1].input, dict)


def test_conversations_reach_the_template(live: Live, claude: Any, tokenizer: Tokenizer) -> None:
    messages: Any = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "t", "signature": ""}, {"type": "text", "text": "d"},
            {"type": "tool_use", "id": "1", "name": "look", "input": {"at": "sea"}}]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "e"}], "is_error": True},
            {"type": "text", "text": "f", "cache_control": {"type": "ephemeral"}}]},
    ]  # fmt: skip
    ask(
        claude,
        messages=messages,
        system=[{"type": "text", "text": "S"}],
        tools=[TOOL],
        metadata={"user_id": "u"},
    )
    prompt = tokenizer.decode(live.engine.seen[-1].prompt_token_ids)
    assert prompt == "Sa\nb\ncdError: ef"
    assert claude.messages.count_tokens(model="fake", messages=messages, system="S").input_tokens == len(
        tokenizer.encode(prompt)
    )
    ask(claude, messages=[{"role": "user", "content": "x"}, {"role": "assistant", "content": "So "}])
    assert tokenizer.decode(live.engine.seen[-1].prompt_token_ids) == "xSo "


def test_fields_reach_the_engine(live: Live, claude: Any) -> None:
    ask(
        claude, stop_sequences=["zz"], extra_body={"temperature": 0.25, "top_p": 0.5, "top_k": 7},
        output_config={"format": {"type": "json_schema", "schema": {"type": "object"}}},
    )  # fmt: skip
    got = live.engine.seen[-1].params
    assert (got.temperature, got.top_p, got.top_k, got.stop, got.max_tokens) == (0.25, 0.5, 7, ("zz",), 20)
    assert got.structured.kind == "json"
    ask(claude, tools=[TOOL], tool_choice={"type": "any", "disable_parallel_tool_use": True})
    assert '"maxItems": 1' in live.engine.seen[-1].params.structured.text


BAD: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": None}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 100_000}, "messages|context"),
    ({"messages": []}, "messages"),
    ({"messages": [3]}, r"messages\[0\]"),
    ({"messages": [{"role": "tool", "content": "x"}]}, r"messages\[0\].role"),
    ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, r"messages\[0\].content\[0\].type"),
    ({"messages": [{"role": "user", "content": [{"type": "tool_result", "content": "x"}]}]}, "tool_use_id"),
    ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {}}]}]},
     "end with a call"),
    ({"system": 3}, "system"),
    ({"system": [{"type": "image"}]}, r"system\[0\]"),
    ({"colour": 1}, "colour"),
    ({"container": "x"}, "container"),
    ({"temperature": -1}, "temperature"),
    ({"stop_sequences": [""]}, "stop_sequences"),
    ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
    ({"thinking": {"type": "enabled", "budget_tokens": 50}}, "thinking.budget_tokens"),
    ({"thinking": {"type": "between_tools"}}, "thinking.type"),
    ({"output_config": {"effort": "huge"}}, "output_config.effort"),
    ({"output_config": {"format": {"type": "text"}}}, "output_config.format"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, r"tools\[0\].type"),
    ({"tools": [{"name": "f"}]}, r"tools\[0\].input_schema"),
    ({"tools": [{"input_schema": {}}]}, r"tools\[0\].name"),
    ({"tools": [{**TOOL, "input_examples": [{}]}]}, "input_examples"),
    ({"tool_choice": {"type": "some"}}, "tool_choice.type"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "g"}}, "tool_choice"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "told"), BAD)
def test_bad_bodies_are_refused_in_anthropics_shape(claude: Any, fields: dict[str, Any], told: str) -> None:
    given = {"model": "fake", "max_tokens": 20, "messages": [{"role": "user", "content": "x"}], **fields}
    with pytest.raises(anthropic.BadRequestError, match=told) as refused:
        claude.post("/v1/messages", body=given, cast_to=object)
    body: Any = refused.value.body
    assert body["type"] == "error" and body["error"]["type"] == "invalid_request_error"
    assert set(body["error"]) == {"type", "message"}


def test_other_refusals(live: Live, claude: Any) -> None:
    with pytest.raises(anthropic.NotFoundError) as refused:
        ask(claude, model="other")
    body: Any = refused.value.body
    assert body["error"]["type"] == "not_found_error"
    for raw in (b"{", b"[]", b'{"messages": "x"}', b"\xff"):
        for path in ("/v1/messages", "/v1/messages/count_tokens"):
            answer = live.http.post(path, content=raw)
            assert answer.status_code == 400 and answer.json()["error"]["type"] == "invalid_request_error"


def test_a_failing_engine_is_told_in_the_stream(start: Start) -> None:
    live = start(step_seconds=0.01)
    with anthropic.Anthropic(base_url=live.url, api_key="x", max_retries=0) as client:
        stream = ask(client, max_tokens=400, stream=True)
        next(stream)
        live.engine.die()
        with pytest.raises(anthropic.APIStatusError, match="the engine process died"):
            list(stream)


def test_keys_are_taken_from_either_header(start: Start) -> None:
    live = start(config={"api_key": ("secret",)})
    with anthropic.Anthropic(base_url=live.url, api_key="secret", max_retries=0) as client:
        assert ask(client).stop_reason == "max_tokens"
    with anthropic.Anthropic(base_url=live.url, auth_token="secret", api_key=None, max_retries=0) as client:
        assert ask(client).stop_reason == "max_tokens"
    with (
        anthropic.Anthropic(base_url=live.url, api_key="wrong", max_retries=0) as client,
        pytest.raises(anthropic.AuthenticationError),
    ):
        ask(client)


def test_refusals_before_the_route_are_in_anthropics_shape_too(start: Start) -> None:
    guarded = start(config={"api_key": ("secret",)})
    full = start(config={"max_concurrent_requests": 1})
    full.app.state.gate.enter()
    many = {f"x-{i}": "" for i in range(300)}
    draining = start()
    draining.app.state.gate.draining = True
    live = start(config={"max_body_bytes": 1024})
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        for answer, status, kind in (
            (guarded.post(path), 401, "authentication_error"),
            (full.post(path), 429, "rate_limit_error"),
            (full.http.post(path, headers=many), 431, "invalid_request_error"),
            (draining.post(path), 503, "overloaded_error"),
            (live.http.get(path), 405, "invalid_request_error"),
            (live.post(path, model="x" * 2000), 413, "request_too_large"),
            (live.post(path + "/batches"), 404, "not_found_error"),
        ):
            body = answer.json()
            assert (answer.status_code, body["type"], body["error"]["type"]) == (status, "error", kind)
            assert set(body) == {"type", "error"} and set(body["error"]) == {"type", "message"}
    assert set(guarded.post("/v1/messages_").json()) == {"error"}  # OpenAI's shape
