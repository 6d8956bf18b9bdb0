"""/v1/responses by OpenAI's own client: whole, streamed, stored, in the background; and what it refuses."""

import asyncio
import json
import signal
import threading
import time
from typing import Any

import httpx
import openai
import pytest
from pydantic import BaseModel

from compilerllm.errors import InvalidParameter
from compilerllm.parsing.parts import CallArguments, CallStart, Content, Part, Reasoning
from compilerllm.server.app import build_app
from compilerllm.server.blocks import Blocks
from compilerllm.server.chat import CallDelta, ChatDelta
from compilerllm.server.config import ServerConfig
from compilerllm.server.routes.responses.items import check_calls, instruct, merge_turns, read_items
from compilerllm.server.run import address_of, bind, make_server
from compilerllm.server.stored import Finished, StoredResponses
from compilerllm.text.tokenizer import Tokenizer
from tests.server.conftest import Live, Start
from tests.server.fake_engine import FakeEngine
from tests.server.markup import MARKED, use_markup

TEXT = "the quick brown été 日本語 🙂🎉 fox"
TOOL: Any = {
    "type": "function",
    "name": "look",
    "description": "Look.",
    "parameters": {"type": "object", "properties": {"at": {"type": "string"}}},
    "strict": False,
}


def create(live: Live, **options: Any) -> Any:
    return live.client.responses.create(**{"model": "fake", "input": TEXT, **options})


def test_whole(live: Live, tokenizer: Tokenizer) -> None:
    count = len(tokenizer.encode(TEXT))
    made = create(live, max_output_tokens=count, metadata={"who": "me"}, user="u", temperature=0.5)
    assert made.output_text == TEXT and made.object == "response" and made.id.startswith("resp_")
    (message,) = made.output
    assert message.type == "message" and message.role == "assistant" and message.status == "incomplete"
    assert made.status == "incomplete" and made.incomplete_details.reason == "max_output_tokens"
    assert (made.usage.input_tokens, made.usage.output_tokens, made.usage.total_tokens) == (
        count,
        count,
        2 * count,
    )
    assert made.usage.input_tokens_details.cached_tokens == 3
    assert made.metadata == {"who": "me"} and made.user == "u" and made.temperature == 0.5
    assert made.tool_choice == "auto" and made.tools == [] and made.text.format.type == "text"


def test_it_completes_at_the_end_of_the_text(live: Live, tokenizer: Tokenizer) -> None:
    ended = create(live, input=TEXT + tokenizer.named_tokens["eos_token"], max_output_tokens=100)
    assert ended.status == "completed" and ended.output_text == TEXT and ended.incomplete_details is None
    assert ended.output[0].status == "completed" and ended.completed_at >= ended.created_at


def test_stream_has_every_event_in_order(live: Live, tokenizer: Tokenizer) -> None:
    count = len(tokenizer.encode(TEXT))
    events = list(create(live, max_output_tokens=count, stream=True))
    kinds = [e.type for e in events]
    assert kinds[:4] == ["response.created", "response.in_progress", "response.output_item.added",
                         "response.content_part.added"]  # fmt: skip
    assert kinds[-4:] == ["response.output_text.done", "response.content_part.done", "response.output_item.done",
                          "response.incomplete"]  # fmt: skip
    assert set(kinds[4:-4]) == {"response.output_text.delta"} and len(kinds) > 12
    assert [e.sequence_number for e in events] == list(range(len(events)))
    assert (
        "".join(e.delta for e in events if e.type == "response.output_text.delta") == TEXT == events[-4].text
    )
    final = events[-1].response
    assert final.output_text == TEXT and final.usage.output_tokens == count
    assert live.client.responses.retrieve(final.id) == final


def test_the_stream_helper_and_the_async_client(live: Live, tokenizer: Tokenizer) -> None:
    text = TEXT + tokenizer.named_tokens["eos_token"]
    with live.client.responses.stream(model="fake", input=text, max_output_tokens=99) as stream:
        assert stream.get_final_response().output_text == TEXT

    async def ask() -> str:
        async with openai.AsyncOpenAI(base_url=live.url + "/v1", api_key="x", max_retries=0) as client:
            made = await client.responses.create(model="fake", input=text, max_output_tokens=99)
            async with client.responses.stream(model="fake", input=text, max_output_tokens=99) as stream:
                streamed = await stream.get_final_response()
            assert streamed.output_text == made.output_text
            return made.output_text

    assert asyncio.run(ask()) == TEXT


class Point(BaseModel):
    x: int
    y: int


def test_parse_asks_for_the_schema(live: Live, tokenizer: Tokenizer) -> None:
    text = '{"x":1,"y":2}' + tokenizer.named_tokens["eos_token"]
    made = live.client.responses.parse(model="fake", input=text, text_format=Point, max_output_tokens=99)
    assert made.output_parsed == Point(x=1, y=2)
    asked = live.engine.seen[-1].params.structured
    assert asked.kind == "json" and set(json.loads(asked.text)["properties"]) == {"x", "y"}
    assert (
        create(live, text={"format": {"type": "json_object"}}, max_output_tokens=2).text.format.type
        == "json_object"
    )
    assert live.engine.seen[-1].params.structured.kind == "json_object"


def test_sampling_fields_reach_the_engine(live: Live) -> None:
    create(
        live, max_output_tokens=3, temperature=0.25, top_p=0.5,
        extra_body={"seed": 5, "top_k": 7, "stop": "zzz", "presence_penalty": 1.0, "logit_bias": {"3": 2}},
    )  # fmt: skip
    got = live.engine.seen[-1].params
    assert (got.max_tokens, got.temperature, got.top_p, got.seed, got.top_k) == (3, 0.25, 0.5, 5, 7)
    assert got.stop == ("zzz",) and got.presence_penalty == 1.0 and got.logit_bias == {3: 2}


def test_logprobs(live: Live) -> None:
    asked: Any = {"include": ["message.output_text.logprobs"], "top_logprobs": 2, "max_output_tokens": 4}
    scores = create(live, **asked).output[0].content[0].logprobs
    assert len(scores) == 4 and all(len(s.top_logprobs) == 2 and s.logprob == -0.5 for s in scores)
    events = list(create(live, **asked, stream=True))
    streamed = [s for e in events if e.type == "response.output_text.delta" for s in e.logprobs]
    assert [s.token for s in streamed] == [s.token for s in scores]
    assert create(live, max_output_tokens=2).output[0].content[0].logprobs == []


def retrieve(live: Live, response_id: str) -> Any:
    return live.client.responses.retrieve(response_id)


# -- stored -------------------------------------------------------------------------------------------------------


def test_conversations_go_on(live: Live, tokenizer: Tokenizer) -> None:
    eos = tokenizer.named_tokens["eos_token"]
    first = create(live, input="one " + eos, instructions="be ", max_output_tokens=50)
    assert first.output_text == "be one "
    second = create(live, input="two " + eos, previous_response_id=first.id, max_output_tokens=50)
    # The instructions are the first response's alone, its answer is part of the conversation.
    assert second.output_text.startswith("one ") and second.previous_response_id == first.id
    prompt = tokenizer.decode(live.engine.seen[-1].prompt_token_ids)
    assert prompt.replace(eos, "") == "one be one two "
    kept = retrieve(live, second.id)
    assert kept == second
    live.client.responses.delete(second.id)
    for call in (live.client.responses.retrieve, live.client.responses.delete, live.client.responses.cancel):
        with pytest.raises(openai.NotFoundError) as refused:
            call(second.id)
        assert refused.value.code == "response_not_found"
    with pytest.raises(openai.NotFoundError) as gone:
        create(live, previous_response_id=second.id)
    assert gone.value.param == "previous_response_id"


def test_store_false_stores_nothing(live: Live) -> None:
    made = create(live, store=False, max_output_tokens=2)
    with pytest.raises(openai.NotFoundError):
        retrieve(live, made.id)


def test_the_store_is_bounded_and_drops_the_least_used(start: Start) -> None:
    live = start(config={"responses_store_bytes": 16384})
    ids = [create(live, max_output_tokens=2).id]
    for _ in range(20):
        ids.append(create(live, max_output_tokens=2).id)
        retrieve(live, ids[0])
    with pytest.raises(openai.NotFoundError):
        retrieve(live, ids[1])
    assert retrieve(live, ids[0]).id == ids[0]
    assert retrieve(live, ids[-1]).id == ids[-1]


def test_the_store_counts_its_bytes() -> None:
    store = StoredResponses(10_000)
    for i in range(30):
        store.put(str(i), Finished(b"x" * 1000, b"y" * 500, False))
        assert store.num_bytes == len(store) * 2524 <= 10_000
    store.put("large", Finished(b"x" * 20_000, b"", False))
    assert len(store) == 3 and isinstance(store.find("29"), Finished)
    for i in (27, 28, 29):
        store.remove(str(i))
    assert store.num_bytes == 0 == len(store)
    assert len(StoredResponses(0)) == 0


# -- in the background --------------------------------------------------------------------------------------------


def test_background_is_polled(live: Live) -> None:
    made = create(live, background=True, max_output_tokens=20)
    assert made.status == "queued" and made.output == []
    live.wait_until(lambda: retrieve(live, made.id).status == "incomplete")
    done = retrieve(live, made.id)
    assert done.usage.output_tokens == 20 and done.output_text.startswith("the quick") and done.background
    assert live.client.responses.cancel(done.id) == done, "one that has ended stays as it is"


def test_a_draining_server_lets_background_responses_end(tokenizer: Tokenizer) -> None:
    config = ServerConfig(port=0, shutdown_timeout=20)
    listener = bind(config)
    engine = FakeEngine(vocab_size=tokenizer.vocab_size, step_seconds=0.02)
    app = build_app(engine, tokenizer, config, "fake")
    server = make_server(app, config)
    thread = threading.Thread(target=lambda: server.run(sockets=[listener]), daemon=True)
    thread.start()
    body = {"input": TEXT, "background": True, "max_output_tokens": 40}
    with httpx.Client(base_url=address_of(listener, config), timeout=20) as http:
        while not server.started:
            time.sleep(0.01)
        made = http.post("/v1/responses", json=body).json()["id"]
        server.handle_exit(signal.SIGTERM, None)
        assert http.post("/v1/responses", json=body).status_code == 503
        assert http.get(f"/v1/responses/{made}").json()["status"] == "in_progress"
        thread.join(20)
    ended = app.state.stored_responses.find(made)
    assert not thread.is_alive() and isinstance(ended, Finished)
    told = json.loads(ended.body)
    assert told["status"] == "incomplete" and told["usage"]["output_tokens"] == 40


def test_background_is_cancelled(start: Start) -> None:
    live = start(step_seconds=0.01)
    made = create(live, background=True, max_output_tokens=400)
    live.wait_until(lambda: retrieve(live, made.id).output_text.startswith("the"))
    assert retrieve(live, made.id).status == "in_progress"
    with pytest.raises(openai.BadRequestError, match="has not ended"):
        create(live, previous_response_id=made.id)
    ended = live.client.responses.cancel(made.id)
    assert ended.status == "cancelled" and live.engine.num_open == 0
    assert retrieve(live, made.id).status == "cancelled"
    other = create(live, background=True, max_output_tokens=400)
    live.client.responses.delete(other.id)
    live.wait_until(lambda: live.engine.num_open == 0)
    with pytest.raises(openai.NotFoundError):
        retrieve(live, other.id)


def test_background_streams_are_followed_again(start: Start) -> None:
    live = start(step_seconds=0.005)
    stream = create(live, background=True, stream=True, max_output_tokens=60)
    first = [next(stream) for _ in range(6)]
    assert [e.type for e in first[:3]] == ["response.created", "response.queued", "response.in_progress"]
    stream.close()  # the run goes on
    rest: list[Any] = list(
        live.client.responses.retrieve(first[0].response.id, stream=True, starting_after=5)
    )
    assert [e.sequence_number for e in rest] == list(range(6, 6 + len(rest)))
    assert rest[-1].type == "response.incomplete" and rest[-1].response.usage.output_tokens == 60
    again = list(live.client.responses.retrieve(first[0].response.id, stream=True))
    assert again[:6] == first and again[6:] == rest
    plain = create(live, max_output_tokens=2)
    with pytest.raises(openai.BadRequestError):
        live.client.responses.retrieve(plain.id, stream=True)
    with pytest.raises(openai.BadRequestError):
        live.client.responses.cancel(plain.id)


def test_a_failing_engine_fails_the_response(start: Start) -> None:
    live = start(step_seconds=0.01)
    made = create(live, background=True, max_output_tokens=400)
    stream = create(live, stream=True, max_output_tokens=400)
    head = [next(stream) for _ in range(5)]
    live.engine.die()
    last = [*head, *stream][-1]
    assert last.type == "response.failed" and last.response.error.code == "server_error"
    live.wait_until(lambda: retrieve(live, made.id).status == "failed")
    assert retrieve(live, made.id).error.message == "the engine process died"


def test_hanging_up_frees_the_engine(start: Start) -> None:
    live = start(step_seconds=0.01)
    stream = create(live, stream=True, max_output_tokens=400)
    next(stream)
    stream.close()
    live.wait_until(lambda: live.engine.num_open == 0)


# -- thoughts and calls -------------------------------------------------------------------------------------------


def marked(live: Live, monkeypatch: pytest.MonkeyPatch, tokenizer: Tokenizer, **options: Any) -> Any:
    use_markup(monkeypatch)
    text = MARKED + tokenizer.named_tokens["eos_token"]
    return create(live, input=text, max_output_tokens=200, tools=[TOOL], **options)


def test_thoughts_and_calls_are_items(
    live: Live, monkeypatch: pytest.MonkeyPatch, tokenizer: Tokenizer
) -> None:
    made = marked(live, monkeypatch, tokenizer)
    thought, message, first, second = made.output
    assert thought.type == "reasoning" and thought.content[0].text == "hmm, été"
    assert message.type == "message" and message.content[0].text == "I look."
    assert (first.type, first.name, json.loads(first.arguments)) == ("function_call", "look", {"at": "sea"})
    assert (second.name, json.loads(second.arguments)) == ("look", {"at": "sky"})
    assert first.call_id != second.call_id and made.status == "completed"
    assert 0 < made.usage.output_tokens_details.reasoning_tokens < made.usage.output_tokens
    assert made.tools[0].name == "look"


def test_streamed_items_add_up_to_the_whole(
    live: Live, monkeypatch: pytest.MonkeyPatch, tokenizer: Tokenizer
) -> None:
    whole = marked(live, monkeypatch, tokenizer)
    events = list(marked(live, monkeypatch, tokenizer, stream=True))
    assert [e.sequence_number for e in events] == list(range(len(events)))
    final = events[-1].response
    assert events[-1].type == "response.completed"

    def told(items: Any) -> list[Any]:
        return [i.model_dump(exclude={"id", "call_id"}) for i in items]

    assert told(final.output) == told(whole.output)
    assert [e.item for e in events if e.type == "response.output_item.done"] == final.output
    joined = {"reasoning_text": "", "output_text": "", "function_call_arguments": ""}
    for event in events:
        if event.type.endswith(".delta"):
            joined[event.type.split(".")[1]] += event.delta
            assert event.item_id == final.output[event.output_index].id
    assert joined == {"reasoning_text": "hmm, été", "output_text": "I look.",
                      "function_call_arguments": '{"at": "sea"}{"at": "sky"}'}  # fmt: skip
    with_helper = marked(live, monkeypatch, tokenizer, include=[], store=False)
    assert told(with_helper.output) == told(whole.output)


def test_calls_and_their_outputs_go_back(
    live: Live, monkeypatch: pytest.MonkeyPatch, tokenizer: Tokenizer
) -> None:
    made = marked(live, monkeypatch, tokenizer)
    answer: Any = {"type": "function_call_output", "call_id": made.output[2].call_id, "output": "blue"}
    monkeypatch.undo()
    for options in (
        {"input": [answer], "previous_response_id": made.id},
        {"input": [{"role": "user", "content": "?"}, *[i.model_dump() for i in made.output], answer]},
    ):
        create(live, max_output_tokens=2, **options)
        prompt = tokenizer.decode(live.engine.seen[-1].prompt_token_ids, skip_special_tokens=False)
        assert prompt.endswith("I look.blue")
    with pytest.raises(openai.BadRequestError, match="no such call"):
        create(live, input=[{**answer, "call_id": "call_other"}])


def test_thoughts_can_be_left_out(live: Live, monkeypatch: pytest.MonkeyPatch, tokenizer: Tokenizer) -> None:
    made = marked(live, monkeypatch, tokenizer, extra_body={"include_reasoning": False})
    assert [i.type for i in made.output] == ["message", "function_call", "function_call"]


@pytest.mark.parametrize("cut", range(1, 12))
def test_blocks_are_the_same_however_parts_come(cut: int) -> None:
    parts: list[Part] = [Reasoning("ab"), Content("c"), CallStart(0, "f", "id"), CallArguments(0, "{}")]
    deltas = [ChatDelta("", [i], None, None) for i in range(4)]
    for i, part in enumerate(parts):
        at = deltas[min(3, i * cut // 4)]
        match part:
            case Reasoning(text):
                at.reasoning += text
            case Content(text):
                at.text += text
            case CallStart(index, name, call_id):
                at.calls.append(CallDelta(index, call_id, name, ""))
            case CallArguments(index, text):
                at.calls.append(CallDelta(index, None, None, text))
    deltas[-1].finish_reason = "stop"
    blocks = Blocks()
    steps = [step for delta in deltas for step in blocks.add(delta)]
    assert [(b.kind, b.text) for b in blocks.blocks] == [("reasoning", "ab"), ("text", "c"), ("call", "{}")]
    assert [s.what for s in steps].count("start") == [s.what for s in steps].count("stop") == 3


# -- items --------------------------------------------------------------------------------------------------------


def test_items_of_one_turn_become_one_message() -> None:
    messages = read_items(
        [
            {"role": "system", "content": "s"},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"},
                                                            {"type": "input_text", "text": "b"}]},
            {"type": "reasoning", "id": "rs", "summary": [{"type": "summary_text", "text": "t"}]},
            {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
            {"type": "function_call", "call_id": "2", "name": "g", "arguments": '{"x": 1}'},
            {"type": "function_call_output", "call_id": "1", "output": "r"},
        ]
    )  # fmt: skip
    assert [m["role"] for m in messages] == ["system", "user", "assistant", "tool"]
    assert messages[1]["content"] == "a\nb" and messages[2]["reasoning"] == "t"
    assert [c["function"]["name"] for c in messages[2]["tool_calls"]] == ["f", "g"]
    check_calls(messages)
    with pytest.raises(InvalidParameter):
        check_calls(messages[3:])
    assert instruct("first", messages)[0] == {"role": "system", "content": "first\n\ns"}
    assert instruct(None, messages) == messages and merge_turns(messages) == messages


BAD_ITEMS: list[tuple[Any, str]] = [
    ([], "input"),
    ([7], "input[0]"),
    ([{"role": "robot", "content": "x"}], "input[0].role"),
    ([{"role": "user"}], "input[0].content"),
    ([{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}], "input[0].content[0]"),
    ([{"role": "user", "content": "x", "colour": 1}], "input[0].colour"),
    ([{"type": "item_reference", "id": "x"}], "input[0].type"),
    ([{"type": "web_search_call", "id": "x"}], "input[0].type"),
    ([{"type": "function_call", "call_id": "1", "name": "f", "arguments": "{"}], "input[0].arguments"),
    ([{"type": "function_call", "call_id": "1", "name": "f", "arguments": "[]"}], "input[0].arguments"),
    ([{"type": "function_call", "name": "f", "arguments": "{}"}], "input[0].call_id"),
    ([{"type": "function_call_output", "call_id": "1", "output": 3}], "input[0].output"),
    ([{"type": "reasoning", "summary": ["x"]}], "input[0].summary[0]"),
    ([{"type": "reasoning", "summary": [], "encrypted_content": "x"}], "input[0].encrypted_content"),
]


@pytest.mark.parametrize(("given", "param"), BAD_ITEMS)
def test_bad_items_are_refused_by_place(given: Any, param: str) -> None:
    with pytest.raises(InvalidParameter) as refused:
        read_items(given)
    assert refused.value.param == param


BAD: list[tuple[dict[str, Any], str | None]] = [
    ({"input": None}, "input"),
    ({"input": 3}, "input"),
    ({"colour": 1}, "colour"),
    ({"model": "other"}, "model"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"max_output_tokens": 100_000}, "input"),
    ({"temperature": -1}, "temperature"),
    ({"top_logprobs": 21}, "top_logprobs"),
    ({"include": ["everything"]}, "include[0]"),
    ({"metadata": {"k": "v" * 513}}, "metadata"),
    ({"metadata": {"k": 1}}, "metadata[...]"),
    ({"background": True, "store": False}, "background"),
    ({"truncation": "some"}, "truncation"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"prompt": {"id": "x"}}, "prompt"),
    ({"previous_response_id": "resp_none"}, "previous_response_id"),
    ({"reasoning": {"effort": "huge"}}, "reasoning.effort"),
    ({"reasoning": {"summary": "detailed"}}, "reasoning.summary"),
    ({"text": {"verbosity": "low"}}, "text.verbosity"),
    ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
    ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
    (
        {"text": {"format": {"type": "json_object"}}, "structured_outputs": {"regex": "a"}},
        "structured_outputs",
    ),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"tools": [{"type": "function", "parameters": {}}]}, "tools[0].name"),
    ({"tools": [{"type": "function", "name": "f", "defer_loading": True}]}, "tools[0].defer_loading"),
    ({"tools": [TOOL, TOOL]}, "tools[1].name"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "g"}}, "tool_choice.name"),
]


@pytest.mark.parametrize(("fields", "param"), BAD)
def test_bad_bodies_are_refused_by_field(live: Live, fields: dict[str, Any], param: str | None) -> None:
    answer = live.post("/v1/responses", **{"model": "fake", "input": "x", **fields})
    error = answer.json()["error"]
    assert answer.status_code in (400, 404) and error["param"] == param, error


def test_bad_queries_are_refused(live: Live) -> None:
    made = create(live, max_output_tokens=2)
    for query in ("colour=1", "stream=maybe", "starting_after=x", "include=all"):
        answer = live.http.get(f"/v1/responses/{made.id}?{query}")
        assert answer.status_code == 400 and "error" in answer.json()
    assert live.http.get(f"/v1/responses/{made.id}?include=message.output_text.logprobs").status_code == 200


def test_truncation_drops_the_oldest(start: Start, tokenizer: Tokenizer) -> None:
    live = start(max_model_len=64)
    items: Any = [{"role": "user", "content": f"message {i:02d} "} for i in range(30)]
    with pytest.raises(openai.BadRequestError) as refused:
        create(live, input=items, max_output_tokens=8)
    assert refused.value.code == "context_length_exceeded"
    create(live, input=items, max_output_tokens=8, truncation="auto", instructions="keep me ")
    prompt = tokenizer.decode(live.engine.seen[-1].prompt_token_ids)
    assert prompt.startswith("keep me ") and prompt.endswith("message 29 ")
    room = 64 - 8 - len(live.engine.seen[-1].prompt_token_ids)
    assert 0 <= room < len(tokenizer.encode("message 00 ")) + 2
    with pytest.raises(openai.BadRequestError):
        create(live, input="word " * 200, truncation="auto")
