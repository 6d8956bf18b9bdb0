"""Forms through a live server over a real engine: every output parses and validates, streamed and not."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

from compilerllm.config import CacheConfig, SchedulerConfig, StructuredConfig
from compilerllm.ir.step import Bucket, Sampled, SampleRows, SamplingTables, StateGroup, StepInputs
from compilerllm.kernels.launch.sampling import empty_tables
from compilerllm.kernels.reference.sampling import sample
from compilerllm.parsing.forced import RequiredCalls
from compilerllm.parsing.parts import Content
from compilerllm.runtime.engine import InProcessEngine
from compilerllm.runtime.grammars import make_grammars
from compilerllm.runtime.messages import ModelFacts
from compilerllm.server.config import ServerConfig
from compilerllm.text.tokenizer import Tokenizer
from tests.server.conftest import Live, serve
from tests.text.tiny_tokenizers import byte_level, save_tokenizer

TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "enum": ["fox", "dog"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


class Babbler:
    """An executable with a vocabulary of text: its logits are noise that favours what closes."""

    leaves_host_free = True
    max_model_len = 512
    groups = (StateGroup("kv", "paged", 16, 64),)
    buckets: tuple[Bucket, ...] = ()

    def __init__(self, vocab_size: int, closing: list[int], spaces: list[int]) -> None:
        self.vocab_size, self._closing, self._spaces = vocab_size, closing, spaces
        self._noise = np.random.default_rng(4)

    def allocate(self, num_blocks: int, max_num_seqs: int) -> SamplingTables:
        self._tables = empty_tables(max_num_seqs)
        return self._tables

    def forward(self, step: StepInputs) -> None:
        self._logits: Any = self._noise.normal(size=(len(step.sample_rows), self.vocab_size)).astype(
            np.float32
        )
        self._logits[:, self._closing] += 5.0  # else one string may fill the answer
        self._logits[:, self._spaces] -= 9.0

    def sample(self, rows: SampleRows) -> Sampled:
        return sample(self._logits, rows, self._tables)

    def logits(self) -> Any:
        return self._logits


@pytest.fixture(scope="module")
def babbling(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Live, Tokenizer]]:
    folder = tmp_path_factory.mktemp("babbler")
    tokenizer = save_tokenizer(byte_level(), folder, chat_template=TEMPLATE)
    closing = [i for i in range(tokenizer.vocab_size) if tokenizer.token_bytes(i) in (b'"', b"}", b"]", b",")]
    spaces = [i for i in range(tokenizer.vocab_size) if not tokenizer.token_bytes(i).strip()]
    model = Babbler(tokenizer.vocab_size + 10, [*closing, *tokenizer.eos_token_ids], spaces)
    facts = ModelFacts(model="babbler", target="none", tokenizer=str(folder))
    engine = InProcessEngine(
        model,
        SchedulerConfig(max_num_seqs=8, async_scheduling=True),
        CacheConfig(num_blocks=2000),
        facts=facts,
        grammars=make_grammars(facts, model.vocab_size, StructuredConfig()),
    )
    with serve(tokenizer, ServerConfig(port=0), engine) as live:
        yield live, tokenizer
    engine.close()


def ask(live: Live, **fields: Any) -> Any:
    messages: Any = [{"role": "user", "content": "the fox"}]
    return live.client.chat.completions.create(model="fake", messages=messages, max_tokens=400, **fields)


def text_of(answer: Any, stream: bool) -> str:
    if stream:
        return "".join(c.choices[0].delta.content or "" for c in answer if c.choices)
    return str(answer.choices[0].message.content)


@pytest.mark.parametrize("stream", [False, True])
def test_schemas_through_the_sdk(babbling: tuple[Live, Tokenizer], stream: bool) -> None:
    live, _ = babbling
    wanted = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
    seen = set()
    for _ in range(6):
        text = text_of(ask(live, response_format=wanted, temperature=1.0, stream=stream), stream)
        jsonschema.validate(json.loads(text), PERSON)
        seen.add(text)
    assert len(seen) > 1, "it is always the same"
    loose = text_of(ask(live, response_format={"type": "json_object"}, stream=stream), stream)
    assert isinstance(json.loads(loose), dict)


def test_other_forms_and_beside_free_text(babbling: tuple[Live, Tokenizer]) -> None:
    live, _ = babbling
    choice = ask(live, n=3, temperature=1.0, extra_body={"structured_outputs": {"choice": ["yes", "no"]}})
    assert {c.message.content for c in choice.choices} <= {"yes", "no"}
    assert all(c.finish_reason == "stop" for c in choice.choices)
    number = ask(live, extra_body={"guided_regex": r"[1-9]\d{2}"}).choices[0].message.content
    assert number.isdigit() and len(number) == 3
    free = live.client.completions.create(model="fake", prompt="the", max_tokens=20)
    assert free.usage is not None and free.usage.completion_tokens >= 1


@pytest.mark.parametrize(
    ("form", "param"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "strnig"}}}}, "response_format"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs"),
        ({"structured_outputs": {"grammar": "nonsense"}}, "structured_outputs"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
def test_bad_forms_get_a_400(babbling: tuple[Live, Tokenizer], form: Any, param: str, stream: bool) -> None:
    live, _ = babbling
    reply = live.post(
        "/v1/chat/completions", messages=[{"role": "user", "content": "x"}], stream=stream, **form
    )
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert error["param"] == param and error["type"] == "invalid_request_error"


def test_limits_that_contradict_a_form_are_an_error(babbling: tuple[Live, Tokenizer]) -> None:
    live, tokenizer = babbling
    (letter,) = tokenizer.encode("z", False)
    reply = live.post(
        "/v1/completions",
        prompt="x",
        max_tokens=5,
        allowed_token_ids=[letter],
        structured_outputs={"choice": ["yes"]},
    )
    assert reply.status_code == 500 and "contradict" in reply.json()["error"]["message"]


TOOLS: Any = [{"type": "function", "function": {"name": "find", "parameters": PERSON}}]


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "find"}}], ids=["required", "named"]
)
def test_calls_that_are_required_are_calls(babbling: tuple[Live, Tokenizer], choice: Any) -> None:
    live, _ = babbling
    answer = ask(live, tools=TOOLS, tool_choice=choice).choices[0]
    assert answer.finish_reason == "tool_calls" and answer.message.content is None
    for call in answer.message.tool_calls:
        assert call.function.name == "find" and call.id
        jsonschema.validate(json.loads(call.function.arguments), PERSON)
    arguments, finish = "", None
    for chunk in ask(
        live, tools=TOOLS, tool_choice={"type": "function", "function": {"name": "find"}}, stream=True
    ):
        for call in chunk.choices[0].delta.tool_calls or ():
            assert call.index == 0
            arguments += call.function.arguments or ""
        finish = chunk.choices[0].finish_reason or finish
    jsonschema.validate(json.loads(arguments), PERSON)
    assert finish == "tool_calls"


def test_calls_that_break_off_lose_no_text() -> None:
    parser = RequiredCalls()
    assert parser.add('[{"name": "f", ') == [] and parser.add('"para') == []
    assert parser.finish() == [Content('[{"name": "f", "para')]
    assert RequiredCalls().finish() == []


def test_folders_without_a_tokenizer_have_no_grammars(tmp_path: Path) -> None:
    facts = ModelFacts(model="m", target="none")
    assert make_grammars(facts, 10, StructuredConfig()) is None
