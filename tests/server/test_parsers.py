"""Thoughts and calls of models' own, told apart in every API: the fake engine says what the message says."""

import json
from typing import Any

import pytest

from compilerllm.parsing.choose import UnknownParser
from compilerllm.server.config import ServerConfig
from tests.parsing.samples import SAMPLES
from tests.server.conftest import Live, Start

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "days": {"type": "integer"},
                "metric": {"type": "boolean"},
            },
        },
    },
}


END = "<|end|>"  # ends the engine's output


def open_with(start: Start, name: str) -> tuple[Live, Any]:
    reasoning, tools, *sample = SAMPLES[name]
    config = {"reasoning_parser": reasoning, "tool_call_parser": tools}
    return start(config=config, max_model_len=2048), sample


def asked(text: str, **more: Any) -> dict[str, Any]:
    return {
        "model": "fake",
        "messages": [{"role": "user", "content": text + END}],
        "max_tokens": 600,
        "tools": [WEATHER],
        **more,
    }


@pytest.mark.parametrize("name", ["qwen3_coder", "kimi_k2", "hermes", "deepseek_r1"])
def test_chat_whole_and_streamed(start: Start, name: str) -> None:
    live, (text, thoughts, answer, calls) = open_with(start, name)
    whole = live.client.chat.completions.create(**asked(text))
    message = whole.choices[0].message
    assert (message.content or "") == answer
    assert getattr(message, "reasoning", "") == getattr(message, "reasoning_content", "") == thoughts
    made = [(c.function.name, json.loads(c.function.arguments)) for c in message.tool_calls or []]
    assert made == calls
    assert whole.choices[0].finish_reason == ("tool_calls" if calls else "stop")
    assert len({c.id for c in message.tool_calls or []}) == len(calls)
    content = reasoning = ""
    streamed: list[tuple[str, str]] = []
    for chunk in live.client.chat.completions.create(**asked(text, stream=True)):
        delta = chunk.choices[0].delta
        content += delta.content or ""
        reasoning += getattr(delta, "reasoning", None) or ""
        for call in delta.tool_calls or []:
            if call.id:
                assert call.function.name and call.index == len(streamed)
                streamed.append((call.function.name, ""))
            streamed[call.index] = (
                streamed[call.index][0],
                streamed[call.index][1] + (call.function.arguments or ""),
            )
    assert (content, reasoning) == (answer, thoughts)
    assert [(n, json.loads(a)) for n, a in streamed] == calls
    assert chunk.choices[0].finish_reason == whole.choices[0].finish_reason


def test_a_request_may_leave_calls_and_thoughts_alone(start: Start) -> None:
    live, (text, _, answer, _) = open_with(start, "hermes")
    none = live.client.chat.completions.create(**asked(text, tool_choice="none")).choices[0].message
    assert none.content == text and not none.tool_calls
    one = live.client.chat.completions.create(**asked(text, parallel_tool_calls=False)).choices[0].message
    assert one.content == answer and len(one.tool_calls or []) == 1
    live, (text, _, answer, _) = open_with(start, "deepseek_r1")
    body = live.post("/v1/chat/completions", **asked(text, include_reasoning=False)).json()
    assert (
        body["choices"][0]["message"]["content"] == answer
        and "reasoning" not in body["choices"][0]["message"]
    )


def test_responses_and_messages(start: Start) -> None:
    live, (text, thoughts, answer, calls) = open_with(start, "qwen3_coder")
    tool = {"type": "function", **WEATHER["function"]}  # type: ignore[dict-item]
    response = live.post(
        "/v1/responses", model="fake", input=text + END, tools=[tool], max_output_tokens=600
    ).json()
    kinds = {item["type"]: item for item in response["output"]}
    assert kinds["reasoning"]["content"][0]["text"] == thoughts
    assert kinds["message"]["content"][0]["text"] == answer
    assert (kinds["function_call"]["name"], json.loads(kinds["function_call"]["arguments"])) == calls[0]
    function = WEATHER["function"]
    message = live.post(
        "/v1/messages", model="fake", max_tokens=600, messages=[{"role": "user", "content": text + END}],
        tools=[{"name": function["name"], "input_schema": function["parameters"]}],  # type: ignore[index]
    ).json()  # fmt: skip
    blocks = {block["type"]: block for block in message["content"]}
    assert blocks["thinking"]["thinking"] == thoughts and blocks["text"]["text"] == answer
    assert (blocks["tool_use"]["name"], blocks["tool_use"]["input"]) == calls[0]
    assert message["stop_reason"] == "tool_use"


def test_an_output_held_to_a_form_has_no_thoughts(start: Start) -> None:
    live, _ = open_with(start, "deepseek_r1")
    body = asked('{"a": 1}', response_format={"type": "json_object"}, tools=[])
    assert live.client.chat.completions.create(**body).choices[0].message.content == '{"a": 1}'


def test_budgets_of_thoughts_need_marks(start: Start) -> None:
    live, (text, *_) = open_with(start, "qwen3")
    assert live.post("/v1/chat/completions", **asked(text, thinking_token_budget=4)).status_code == 200
    live = start(config={"reasoning_parser": "none"})
    refused = live.post("/v1/chat/completions", **asked(text, thinking_token_budget=4))
    assert refused.status_code == 400 and "--reasoning-parser" in refused.json()["error"]["message"]


def test_a_parser_that_there_is_not_is_refused_before_anything_starts() -> None:
    with pytest.raises(UnknownParser, match="did you mean qwen3_coder"):
        ServerConfig(tool_call_parser="qwen3coder")
