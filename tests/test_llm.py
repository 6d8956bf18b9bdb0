"""``LLM`` over the real in-process engine and a model small enough to compute by hand."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from compilerllm import LLM, SamplingParams
from compilerllm.config import SchedulerConfig
from compilerllm.errors import ContextLengthExceeded, GenerationFailed, InvalidParameter
from compilerllm.runtime.engine import InProcessEngine
from compilerllm.text.absent import open_tokenizer
from tests.runtime.fake_model import EOS, PAGED, POISON, VOCAB, FakeModel, generate_alone
from tests.text.tiny_tokenizers import letters, save_tokenizer

TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}a{% endif %}"
GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
PROMPTS = ["abc", "hello", "jjj", "abcd"]


@pytest.fixture(params=[True, False], ids=["overlapped", "in turn"])
def llm(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[LLM]:
    tokenizer = save_tokenizer(letters(VOCAB), tmp_path, eos_token="<|end|>", chat_template=TEMPLATE)
    assert tokenizer.eos_token_ids == (EOS,) and tokenizer.vocab_size == VOCAB
    engine = InProcessEngine(FakeModel(PAGED, 48), SchedulerConfig(async_scheduling=request.param))
    with LLM.over(engine, tokenizer) as llm:
        yield llm
        engine.scheduler.pool.check()
        assert engine.stats().num_running == 0 and not engine.has_unfinished()


def alone(llm: LLM, prompt: str, params: SamplingParams = GREEDY) -> tuple[list[int], str]:
    return generate_alone(PAGED, llm.tokenizer.encode(prompt), params, 48)


def test_a_batch_gives_what_each_prompt_gives_alone(llm: LLM) -> None:
    outputs = llm.generate(PROMPTS, GREEDY)
    assert [o.prompt for o in outputs] == PROMPTS and all(o.finished for o in outputs)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        ids, reason = alone(llm, prompt)
        assert (output.outputs[0].token_ids, output.outputs[0].finish_reason) == (ids, reason)
        assert output.outputs[0].text == llm.tokenizer.decode(ids)
        assert output.prompt_token_ids == llm.tokenizer.encode(prompt)
    assert len({o.request_id for o in outputs}) == 4


def test_tokens_alone_cost_no_text(llm: LLM) -> None:
    silent = SamplingParams(temperature=0.0, max_tokens=12, detokenize=False)
    (spoken,), (output,) = llm.generate("abc", GREEDY), llm.generate("abc", silent)
    assert output.outputs[0].token_ids == spoken.outputs[0].token_ids and output.outputs[0].text == ""
    assert output.outputs[0].finish_reason == spoken.outputs[0].finish_reason
    with pytest.raises(InvalidParameter, match="cannot go with detokenize=False"):
        SamplingParams(stop=("a",), detokenize=False)
    assert llm.encode("abc") == llm.tokenizer.encode("abc")


def test_prompts_of_every_kind(llm: LLM) -> None:
    ids = llm.tokenizer.encode("abc")
    expected = llm.generate("abc", GREEDY)[0].outputs[0].text
    kinds: list[Any] = [
        ["abc"],
        {"prompt": "abc"},
        [{"prompt": "abc"}],
        ids,
        [ids],
        {"prompt_token_ids": ids},
    ]
    for prompts in kinds:
        (output,) = llm.generate(prompts, GREEDY)
        assert output.outputs[0].text == expected, prompts
    assert llm.generate([ids], GREEDY)[0].prompt is None
    assert llm.generate([], GREEDY) == []


def test_parameters_for_each_prompt_and_several_outputs(llm: LLM) -> None:
    params = [
        SamplingParams(temperature=0.0, max_tokens=3),
        SamplingParams(temperature=1.0, seed=5, n=3, max_tokens=4),
    ]
    first, second = llm.generate(["abc", "abd"], params)
    assert len(first.outputs) == 1 and len(first.outputs[0].token_ids) <= 3
    assert [o.index for o in second.outputs] == [0, 1, 2]
    for i, output in enumerate(second.outputs):
        one = SamplingParams(temperature=1.0, seed=5 + i, max_tokens=4)
        assert output.token_ids == alone(llm, "abd", one)[0]
    with pytest.raises(InvalidParameter, match="2 prompts but 1"):
        llm.generate(["a", "b"], [GREEDY])


def test_prefix_hits_are_counted(llm: LLM) -> None:
    assert llm.generate("abcdefghijkl", GREEDY)[0].num_cached_tokens == 0
    assert llm.generate("abcdefghijkl", GREEDY)[0].num_cached_tokens >= 8


def test_stop_strings_cut_the_text_and_free_the_request(llm: LLM) -> None:
    whole = llm.generate("abc", SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True))[0].outputs[0]
    stop = whole.text[4:7]
    at = whole.text.index(stop)
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True, stop=(stop,))
    before = llm.stats().steps
    cut = llm.generate("abc", params)[0].outputs[0]
    assert llm.stats().steps - before < at + 8, "the engine went on after the stop string"
    assert (cut.text, cut.finish_reason, cut.stop_reason) == (whole.text[:at], "stop", stop)
    assert cut.token_ids == whole.token_ids[: len(cut.token_ids)] and len(cut.token_ids) < len(
        whole.token_ids
    )


def test_chat_renders_the_template(llm: LLM) -> None:
    conversation = [{"role": "user", "content": "bcd"}]
    answer = llm.chat(conversation, GREEDY)[0]
    assert (
        answer.prompt == "bcda" and answer.outputs[0].text == llm.generate("bcda", GREEDY)[0].outputs[0].text
    )
    assert len(llm.chat([conversation, conversation], GREEDY)) == 2
    assert "".join(llm.stream_chat(conversation, GREEDY)) == answer.outputs[0].text


def test_a_stream_that_is_left_holds_nothing(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    stream = llm.stream("abc", params)
    before = llm.stats().steps
    assert next(stream)
    stream.close()
    assert llm.stats().steps - before < 8, "the engine went on after the reader left"
    assert not llm._engine.has_unfinished()
    assert llm.generate("abc", GREEDY)[0].outputs[0].token_ids == alone(llm, "abc")[0]


def test_logprobs(llm: LLM) -> None:
    output = llm.generate("abc", SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True, logprobs=3))[
        0
    ].outputs[0]
    assert output.logprobs is not None and len(output.logprobs) == 5 and output.cumulative_logprob is not None
    for token_id, at in zip(output.token_ids, output.logprobs, strict=True):
        assert (
            at[token_id].rank == 1
            and len(at) == 3
            and at[token_id].decoded_token == llm.tokenizer.token_text(token_id)
        )
    assert output.cumulative_logprob == pytest.approx(
        sum(at[i].logprob for i, at in zip(output.token_ids, output.logprobs, strict=True))
    )


def test_the_context_end_is_a_length_finish(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)
    output = llm.generate("abc", params)[0].outputs[0]
    assert output.finish_reason == "length" and len(output.token_ids) == 45 and llm.max_model_len == 48


@pytest.mark.parametrize(
    "prompt", ["", [], [VOCAB], [-1], 5, {"text": "a"}, {"prompt_token_ids": ["a"]}, "\ud800"]
)
def test_bad_prompts_are_refused_and_nothing_stays(llm: LLM, prompt: Any) -> None:
    with pytest.raises(InvalidParameter):
        llm.generate(["abc", prompt], GREEDY)
    assert llm.generate("abc", GREEDY)[0].outputs[0].token_ids == alone(llm, "abc")[0]


def test_a_model_without_a_tokenizer_takes_and_gives_ids(tmp_path: Path) -> None:
    tokenizer = open_tokenizer(tmp_path)
    with LLM.over(InProcessEngine(FakeModel(PAGED, 48)), tokenizer) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True, logprobs=1)
        output = llm.generate({"prompt_token_ids": [1, 2, 3]}, params)[0].outputs[0]
        assert output.token_ids == generate_alone(PAGED, [1, 2, 3], params, 48)[0] and output.text == ""
        with pytest.raises(InvalidParameter, match="no tokenizer"):
            llm.generate("abc", params)


def test_too_long_a_prompt_is_refused_with_numbers(llm: LLM) -> None:
    with pytest.raises(ContextLengthExceeded, match="48 tokens, but the request has 60"):
        llm.generate("a" * 60, GREEDY)


def test_a_model_that_fails_is_an_error_and_the_next_call_works(llm: LLM) -> None:
    with pytest.raises(GenerationFailed):
        llm.generate(["abc", [POISON]], GREEDY)
    assert llm.generate("abc", GREEDY)[0].outputs[0].token_ids == alone(llm, "abc")[0]
