"""OpenAI's own client against a live server: chat and text, streamed and whole, sync and async."""

import asyncio
from typing import Any

import openai
import pytest

from compilerllm.text.tokenizer import Tokenizer
from tests.server.conftest import Live, Start

TEXT = "the quick brown été 日本語 🙂🎉 fox"
ASK: Any = [{"role": "user", "content": TEXT}]


def chat(live: Live, **options: Any) -> Any:
    return live.client.chat.completions.create(model="fake", messages=ASK, **options)


def test_chat(live: Live, tokenizer: Tokenizer) -> None:
    count = len(tokenizer.encode(TEXT))
    answer = chat(live, max_tokens=count)
    (choice,) = answer.choices
    assert choice.message.role == "assistant" and choice.message.content == TEXT
    assert choice.finish_reason == "length" and choice.logprobs is None
    assert answer.object == "chat.completion" and answer.id.startswith("chatcmpl-") and answer.model == "fake"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (
        count,
        count,
        2 * count,
    )
    assert answer.usage.prompt_tokens_details.cached_tokens == 3


def test_chat_streams_what_it_gives_whole(live: Live, tokenizer: Tokenizer) -> None:
    count = len(tokenizer.encode(TEXT))
    chunks = list(chat(live, max_tokens=count, stream=True))
    deltas = [c.choices[0].delta.content for c in chunks]
    assert "".join(d or "" for d in deltas) == TEXT and not any("�" in (d or "") for d in deltas)
    assert len(deltas) > 5, "it came at once, not as a stream"
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in chunks if c.choices[0].finish_reason] == ["length"]
    assert len({c.id for c in chunks}) == 1 and all(c.usage is None for c in chunks)


def test_nothing_is_sent_while_a_character_is_not_whole(live: Live, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a🙃b🙃")
    chunks = list(
        live.client.completions.create(model="fake", prompt=ids, max_tokens=len(ids) + 1, stream=True)
    )
    assert [c.choices[0].text for c in chunks] == ["a", "🙃", "b", "🙃", "a"]


def test_async_client_and_many_at_once(live: Live, tokenizer: Tokenizer) -> None:
    async def one(client: openai.AsyncOpenAI, text: str) -> str:
        stream = await client.chat.completions.create(
            model="fake",
            messages=[{"role": "user", "content": text}],
            max_tokens=len(tokenizer.encode(text)),
            stream=True,
        )
        return "".join([c.choices[0].delta.content or "" async for c in stream])

    async def all_of_them() -> list[str]:
        async with openai.AsyncOpenAI(base_url=live.url + "/v1", api_key="x", max_retries=0) as client:
            return await asyncio.gather(*(one(client, f"{i} {TEXT}") for i in range(32)))

    assert asyncio.run(all_of_them()) == [f"{i} {TEXT}" for i in range(32)]


def test_usage_in_streams(live: Live) -> None:
    at_end = list(chat(live, max_tokens=5, stream=True, stream_options={"include_usage": True}))
    assert at_end[-1].choices == [] and at_end[-1].usage.completion_tokens == 5
    assert all(c.usage is None for c in at_end[:-1])
    always = list(chat(live, max_tokens=5, stream=True, stream_options={"continuous_usage_stats": True}))
    assert [c.usage.completion_tokens for c in always] == sorted(c.usage.completion_tokens for c in always)
    assert always[-1].usage.completion_tokens == 5 and always[-1].choices


@pytest.mark.parametrize("stream", [False, True])
def test_n_choices(live: Live, stream: bool) -> None:
    seen = len(live.engine.seen)
    answer = chat(live, n=3, max_tokens=4, seed=7, stream=stream)
    if stream:
        texts = ["", "", ""]
        for chunk in answer:
            texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    else:
        assert [c.index for c in answer.choices] == [0, 1, 2] and answer.usage.completion_tokens == 12
        texts = [c.message.content for c in answer.choices]
    assert texts[0] and texts == [texts[0]] * 3
    assert [r.params.seed for r in live.engine.seen[seen:]] == [7, 8, 9]


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings_end_it_and_free_the_engine(start: Start, stream: bool) -> None:
    live = start(step_seconds=0.005)
    answer = chat(live, max_tokens=400, stop=["n été", "zzz"], stream=stream, stream_options=None)
    if stream:
        chunks = list(answer)
        text, last = "".join(c.choices[0].delta.content or "" for c in chunks), chunks[-1].choices[0]
    else:
        text, last = answer.choices[0].message.content, answer.choices[0]
    assert text == "the quick brow" and last.finish_reason == "stop" and last.stop_reason == "n été"
    live.wait_until(lambda: live.engine.num_open == 0)
    assert len(live.engine.aborted) == 1
    kept = chat(live, max_tokens=400, stop="n été", extra_body={"include_stop_str_in_output": True})
    assert kept.choices[0].message.content == "the quick brown été"


def test_stop_tokens_and_eos(live: Live, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(TEXT)
    by_token = chat(live, max_tokens=100, extra_body={"stop_token_ids": [ids[3]]}).choices[0]
    assert by_token.finish_reason == "stop" and by_token.stop_reason == ids[3]
    assert by_token.message.content == tokenizer.decode(ids[: ids.index(ids[3])])
    eos = list(tokenizer.eos_token_ids)
    ended = live.client.completions.create(model="fake", prompt=[*ids, *eos], max_tokens=100)
    assert ended.choices[0].text == TEXT and ended.choices[0].finish_reason == "stop"
    assert ended.usage is not None and ended.usage.completion_tokens == len(ids) + 1
    on = live.client.completions.create(
        model="fake", prompt=[*ids, *eos], max_tokens=100, extra_body={"ignore_eos": True}
    )
    assert on.choices[0].finish_reason == "length" and on.choices[0].text.startswith(TEXT + "the")


def test_min_tokens_holds_stops_off(live: Live, tokenizer: Tokenizer) -> None:
    count = len(tokenizer.encode(TEXT))
    answer = chat(live, max_tokens=400, stop=["quick"], extra_body={"min_tokens": count})
    assert answer.choices[0].message.content == TEXT + "the "


def test_chat_logprobs(live: Live) -> None:
    whole = chat(live, max_tokens=6, logprobs=True, top_logprobs=2).choices[0].logprobs.content
    streamed = [
        token
        for chunk in chat(live, max_tokens=6, logprobs=True, top_logprobs=2, stream=True)
        if chunk.choices[0].logprobs is not None
        for token in chunk.choices[0].logprobs.content
    ]
    assert len(whole) == 6 and whole == streamed
    assert "".join(t.token for t in whole) == TEXT[: len("".join(t.token for t in whole))]
    assert [t.logprob for t in whole] == [-0.5] * 6 and bytes(whole[0].bytes).decode() == whole[0].token
    assert len(whole[0].top_logprobs) == 2 and whole[0].top_logprobs[1].logprob == -9999.0  # JSON has no -inf
    assert chat(live, max_tokens=2, logprobs=True).choices[0].logprobs.content[0].top_logprobs == []


def test_logprobs_of_tokens_that_are_no_whole_character(live: Live, tokenizer: Tokenizer) -> None:
    count = len(tokenizer.encode("🙃"))
    answer = live.client.completions.create(model="fake", prompt="🙃", max_tokens=count, logprobs=1)
    chat_answer = live.client.chat.completions.create(
        model="fake", messages=[{"role": "user", "content": "🙃"}], max_tokens=count, logprobs=True
    )
    assert answer.choices[0].text == "🙃"
    content = chat_answer.choices[0].logprobs.content  # type: ignore[union-attr]
    assert b"".join(bytes(t.bytes or []) for t in content or []).decode() == "🙃"
    assert any("�" in t.token for t in content or [])


def test_completion_prompts_of_every_kind(live: Live, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("fox jumps")
    count = len(ids)
    for prompt in ("fox jumps", ["fox jumps"], ids, [ids]):
        answer = live.client.completions.create(model="fake", prompt=prompt, max_tokens=count)
        assert [c.text for c in answer.choices] == ["fox jumps"], prompt
        assert answer.object == "text_completion" and answer.id.startswith("cmpl-")
    two = live.client.completions.create(model="fake", prompt=["abab", "the fox"], n=2, max_tokens=30)
    assert [c.index for c in two.choices] == [0, 1, 2, 3]
    assert two.choices[0].text.startswith("abab") and two.choices[3].text.startswith("the fox")


def test_completion_logprobs(live: Live) -> None:
    whole = (
        live.client.completions.create(model="fake", prompt=TEXT, max_tokens=5, logprobs=2)
        .choices[0]
        .logprobs
    )
    assert whole is not None and whole.tokens is not None and whole.text_offset is not None
    assert len(whole.tokens) == 5 and whole.token_logprobs == [-0.5] * 5
    assert whole.text_offset == [len("".join(whole.tokens[:i])) for i in range(5)]
    assert whole.tokens[0] in (whole.top_logprobs or [{}])[0]
    parts = live.client.completions.create(model="fake", prompt=TEXT, max_tokens=5, logprobs=2, stream=True)
    streamed = [c.choices[0].logprobs for c in parts if c.choices[0].logprobs is not None]
    assert [o for p in streamed for o in p.text_offset or []] == whole.text_offset


def test_completion_streams(live: Live, tokenizer: Tokenizer) -> None:
    count = len(tokenizer.encode(TEXT))
    chunks = list(live.client.completions.create(model="fake", prompt=TEXT, max_tokens=count, stream=True))
    assert (
        "".join(c.choices[0].text for c in chunks) == TEXT and chunks[-1].choices[0].finish_reason == "length"
    )


def test_models_version_metrics(live: Live) -> None:
    assert [m.id for m in live.client.models.list()] == ["fake"]
    assert live.client.models.retrieve("fake").id == "fake"
    assert live.http.get("/version").json() == {"version": __import__("compilerllm").__version__}
    chat(live, max_tokens=3)
    metrics = live.http.get("/metrics").text
    for name in ("num_requests_running", "kv_cache_usage_perc", "generation_tokens_total", "prompt_tokens_total",
                 "time_to_first_token_seconds_bucket", "request_success_total", "e2e_request_latency_seconds_count"):  # fmt: skip
        assert f"compilerllm:{name}{{" in metrics, name
    assert 'finished_reason="length",model_name="fake"' in metrics


def test_defaults_come_from_the_generation_config(start: Start, tokenizer: Tokenizer, tmp_path: Any) -> None:
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / file).write_bytes((tokenizer.folder / file).read_bytes())
    (tmp_path / "generation_config.json").write_text(
        '{"temperature": 0.25, "top_k": 40, "eos_token_id": [5, 9]}'
    )
    live = start(text=Tokenizer(tmp_path))
    chat(live, max_tokens=1)
    chat(live, max_tokens=1, temperature=0.0)
    first, second = live.engine.seen
    assert (first.params.temperature, first.params.top_k, second.params.temperature) == (0.25, 40, 0.0)
    assert first.eos_token_ids[:2] == (5, 9)


def test_openapi_describes_the_bodies(live: Live) -> None:
    body = live.http.get("/openapi.json").json()["paths"]["/v1/chat/completions"]["post"]["requestBody"]
    fields = body["content"]["application/json"]["schema"]["properties"]
    assert {"messages", "temperature", "stop", "stream_options"} <= set(fields)
