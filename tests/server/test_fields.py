"""Request fields beyond sampling, as OpenAI and vLLM mean them, through a live server over the fake engine."""

from typing import Any

import pytest

from compilerllm.text.tokenizer import Tokenizer
from tests.server.conftest import Live, Start
from tests.server.fake_engine import FakeEngine

TEXT = "the quick brown fox"


def complete(live: Live, **fields: Any) -> dict[str, Any]:
    reply = live.post("/v1/completions", **{"model": "fake", "prompt": TEXT, "max_tokens": 3, **fields})
    body: dict[str, Any] = reply.json()
    assert reply.status_code == 200, body
    return body


def chat(live: Live, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": TEXT}]
    reply = live.post(
        "/v1/chat/completions", **{"model": "fake", "messages": messages, "max_tokens": 3, **fields}
    )
    body: dict[str, Any] = reply.json()
    assert reply.status_code == 200, body
    return body


def refusal(live: Live, path: str = "/v1/completions", **fields: Any) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": TEXT}]} if "chat" in path else {"prompt": TEXT}
    reply = live.post(path, **body, **fields)
    assert reply.status_code == 400, reply.text
    error: dict[str, Any] = reply.json()["error"]
    return error


def test_echo_and_scores_of_the_prompt(live: Live, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(TEXT)
    (plain,) = complete(live)["choices"]
    (echoed,) = complete(live, echo=True)["choices"]
    assert echoed["text"] == TEXT + plain["text"] and echoed["logprobs"] is None
    (scored,) = complete(live, echo=True, logprobs=2)["choices"]
    logprobs = scored["logprobs"]
    assert logprobs["tokens"] == [tokenizer.token_text(i) for i in (*ids, *(ids * 3)[:3])]
    assert (
        logprobs["token_logprobs"] == [None, *[-0.5] * (len(ids) + 2)] and logprobs["top_logprobs"][0] is None
    )
    assert "".join(logprobs["tokens"])[logprobs["text_offset"][-1] :] == logprobs["tokens"][-1]
    alone = complete(live, echo=True, logprobs=0, max_tokens=0)
    assert alone["choices"][0]["text"] == TEXT and len(alone["choices"][0]["logprobs"]["tokens"]) == len(ids)
    streamed = list(
        live.client.completions.create(
            model="fake", prompt=TEXT, max_tokens=3, echo=True, logprobs=1, stream=True
        )
    )
    assert "".join(c.choices[0].text for c in streamed) == echoed["text"]
    parts = [c.choices[0].logprobs for c in streamed]
    assert [t for p in parts if p is not None for t in p.tokens or []] == logprobs["tokens"]


def test_prompt_logprobs(live: Live, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(TEXT)
    (choice,) = complete(live, prompt_logprobs=1)["choices"]
    for scores in (choice["prompt_logprobs"], chat(live, prompt_logprobs=1)["prompt_logprobs"]):
        assert len(scores) == len(ids) and scores[0] is None
        assert scores[1][str(ids[1])] == {
            "logprob": -0.5,
            "rank": 1,
            "decoded_token": tokenizer.token_text(ids[1]),
        }
    assert refusal(live, prompt_logprobs=1, stream=True)["param"] == "prompt_logprobs"
    assert refusal(live, prompt_logprobs=21)["param"] == "prompt_logprobs"


def test_token_ids_in_the_answer(live: Live, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(TEXT)
    (choice,) = complete(live, return_token_ids=True)["choices"]
    assert choice["token_ids"] == (ids * 3)[:3] and choice["prompt_token_ids"] == ids
    body = chat(live, return_token_ids=True)
    assert body["prompt_token_ids"] == ids and body["choices"][0]["token_ids"] == (ids * 3)[:3]
    named = complete(live, return_tokens_as_token_ids=True, logprobs=1)["choices"][0]["logprobs"]["tokens"]
    assert named == [f"token_id:{i}" for i in (ids * 3)[:3]]


def test_truncation(live: Live, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(TEXT)
    complete(live, truncate_prompt_tokens=2)
    complete(live, truncate_prompt_tokens=2, truncation_side="right")
    complete(live, truncate_prompt_tokens=-1, prompt=[5] * 4000, max_tokens=12)
    engine: FakeEngine = live.engine
    last = [r.prompt_token_ids for r in engine.seen[-3:]]
    assert last == [ids[-2:], ids[:2], [5] * 500]
    assert refusal(live, truncate_prompt_tokens=0)["param"] == "truncate_prompt_tokens"


def test_limits_on_tokens_reach_the_engine(live: Live, tokenizer: Tokenizer) -> None:
    complete(
        live, allowed_token_ids=[3, 4], bad_words=["quick"], cache_salt="s",
        repetition_detection={"max_pattern_size": 3, "min_count": 4},
    )  # fmt: skip
    request = live.engine.seen[-1]
    assert request.params.allowed_token_ids == (3, 4) and request.cache_salt == "s"
    assert request.params.repetition_detection.min_count == 4
    spelled = {tokenizer.decode(ids) for ids in request.bad_words}
    assert spelled == {"quick", " quick"}
    assert refusal(live, allowed_token_ids=[])["param"] == "allowed_token_ids"
    assert refusal(live, allowed_token_ids=[10**6])["param"] == "allowed_token_ids"
    assert refusal(live, bad_words=[""])["param"] == "bad_words"
    assert refusal(live, repetition_detection={"max_pattern_size": 0})["param"] == "repetition_detection"


def test_priority_needs_the_policy(start: Start, live: Live, tokenizer: Tokenizer) -> None:
    assert "--policy priority" in refusal(live, priority=3)["message"]
    other = start(policy="priority")
    complete(other, priority=-2)
    assert other.engine.seen[-1].priority == -2


def test_best_of_shows_the_likeliest(live: Live) -> None:
    body = complete(live, best_of=3, n=2, temperature=1.0)
    assert [c["index"] for c in body["choices"]] == [0, 1] and body["usage"]["completion_tokens"] == 9
    assert all(c["logprobs"] is None for c in body["choices"])
    assert refusal(live, best_of=1, n=2)["param"] == "best_of"
    assert refusal(live, best_of=2, stream=True)["param"] == "best_of"


def test_suffix_needs_a_model_that_fills_in(live: Live) -> None:
    assert "filling in the middle" in refusal(live, suffix="end")["message"]


def test_stream_interval_joins_events(live: Live, tokenizer: Tokenizer) -> None:
    whole = complete(live, max_tokens=11)["choices"][0]["text"]
    chunks = list(
        live.client.completions.create(
            model="fake", prompt=TEXT, max_tokens=11, stream=True, extra_body={"stream_interval": 4}
        )
    )
    assert "".join(c.choices[0].text for c in chunks) == whole and len(chunks) == 3


def test_templates_of_requests(start: Start, live: Live) -> None:
    own = "{{ greeting }} {{ messages[0].content }}"
    assert (
        "--trust-request-chat-template" in refusal(live, "/v1/chat/completions", chat_template=own)["message"]
    )
    trusting = start({"trust_request_chat_template": True})
    body = chat(
        trusting, chat_template=own, chat_template_kwargs={"greeting": "hello"}, max_tokens=9, echo=True
    )
    assert body["choices"][0]["message"]["content"].startswith(TEXT + "hello the")
    broken = refusal(trusting, "/v1/chat/completions", chat_template="{% if %}")
    assert broken["param"] == "chat_template"


@pytest.mark.parametrize("field", ["temperature", "max_tokens", "seed"])
def test_null_is_as_if_left_out(live: Live, field: str) -> None:
    complete(live, **{field: None})
