"""Beam search by ``LLM`` and by the server, over the engine of a tiny model, against transformers' ``generate``."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from compilerllm import LLM
from compilerllm.compiler import make_buckets
from compilerllm.config import CacheConfig, SchedulerConfig
from compilerllm.errors import InvalidParameter
from compilerllm.kernels.launch.weights import execute
from compilerllm.kernels.reference.model import ReferenceModel
from compilerllm.models.model import capture_checkpoint
from compilerllm.models.resolve import resolve
from compilerllm.passes.pipeline import Options, run_pipeline
from compilerllm.runtime.beams import EarlyStopping
from compilerllm.runtime.engine import InProcessEngine
from compilerllm.server.config import ServerConfig
from compilerllm.text.tokenizer import Tokenizer
from tests.models.tiny import tiny_model
from tests.server.conftest import Live, serve
from tests.text.tiny_tokenizers import letters, save_tokenizer

ENDS = [0, 3, 7, 11, 19, 23]  # several, so that beams of a random model end
PROMPTS = [[5, 9, 20, 33], [40, 41, 8, 60, 61, 62, 90]]
WAYS: list[tuple[int, float, EarlyStopping]] = [
    (4, 1.0, False), (3, 0.0, "never"), (5, 1.5, True), (2, -0.5, False), (1, 1.0, False),
]  # fmt: skip


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model("llama")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("letters")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ENDS}))
    return save_tokenizer(letters(97), folder, chat_template="{{ messages[0].content }}")


@pytest.fixture(scope="module")
def make_engine(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[[], InProcessEngine]:
    """Engines over the reference interpreter."""
    folder = tmp_path_factory.mktemp("llama")
    model.save_pretrained(folder)
    captured = capture_checkpoint(resolve(str(folder)))
    module, _ = run_pipeline(captured.module, Options(verify=True))
    source = captured.weights.open()
    params = {p.name: execute(p.recipe, source, name=p.name) for p in captured.names.bind_all(module)}

    def make() -> InProcessEngine:
        served = ReferenceModel(module, params, max_model_len=128, buckets=make_buckets(8, 128))
        scheduler = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=128)
        return InProcessEngine(served, scheduler, CacheConfig(num_blocks=64))

    return make


def wanted(model: Any, prompt: list[int], width: int, penalty: float, early: EarlyStopping) -> Any:
    """transformers' sequences without the prompt and the padding, and their scores."""
    found = model.generate(
        torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), num_beams=width, max_new_tokens=12,
        num_return_sequences=width, length_penalty=penalty, early_stopping=early, do_sample=False, eos_token_id=ENDS,
        pad_token_id=96, return_dict_in_generate=True, output_scores=True,
    )  # fmt: skip
    sequences = []
    for row in found.sequences[:, len(prompt) :].tolist():
        end = next((i + 1 for i, token in enumerate(row) if token in ENDS), len(row))
        sequences.append(row[:end])
    return sequences, found.get("sequences_scores")


@pytest.mark.parametrize(
    "ways", [pytest.param(WAYS[:1], id="one"), pytest.param(WAYS[1:], id="others", marks=pytest.mark.slow)]
)
def test_sequences_and_scores_are_those_of_transformers(
    model: Any,
    tokenizer: Tokenizer,
    make_engine: Callable[[], InProcessEngine],
    ways: list[tuple[int, float, EarlyStopping]],
) -> None:
    engine = make_engine()
    llm = LLM.over(engine, tokenizer)
    ended = 0
    for width, penalty, early in ways:
        found = llm.beam_search(PROMPTS, width, 12, length_penalty=penalty, early_stopping=early)
        for prompt, one in zip(PROMPTS, found, strict=True):
            sequences, scores = wanted(model, prompt, width, penalty, early)
            assert [o.token_ids for o in one.outputs] == sequences, (width, penalty, early)
            for i, output in enumerate(one.outputs):
                assert output.finish_reason == ("stop" if output.token_ids[-1] in ENDS else "length")
                ended += output.finish_reason == "stop"
                if scores is not None and output.cumulative_logprob is not None:
                    score = output.cumulative_logprob / len(output.token_ids) ** penalty
                    assert score == pytest.approx(float(scores[i]), abs=1e-4)
    assert ended > len(ways), "searches in which nothing ends prove little"
    with pytest.raises(InvalidParameter, match="at most 14 beams"):
        llm.beam_search(PROMPTS, 15)
    engine.scheduler.pool.check()
    assert engine.stats().num_running == 0 and not engine.has_unfinished()


@pytest.fixture(scope="module")
def live(tokenizer: Tokenizer, make_engine: Callable[[], InProcessEngine]) -> Iterator[Live]:
    with serve(tokenizer, ServerConfig(port=0), make_engine()) as live:
        yield live


def test_the_server_gives_the_beams_as_choices(model: Any, tokenizer: Tokenizer, live: Live) -> None:
    fields: dict[str, Any] = {"max_tokens": 12, "n": 4, "temperature": 0}
    more = {"use_beam_search": True, "return_token_ids": True}
    answer = live.client.completions.create(model="fake", prompt=PROMPTS, extra_body=more, **fields)
    sequences = [s for p in PROMPTS for s in wanted(model, p, 4, 1.0, False)[0]]
    assert [c.token_ids for c in answer.choices] == sequences
    shown = [[t for t in s if t not in ENDS[:1]] for s in sequences]
    texts = [tokenizer.decode(s[:-1] if s[-1] in ENDS else s) for s in shown]
    assert [c.text for c in answer.choices] == texts
    assert answer.usage and answer.usage.completion_tokens == sum(map(len, sequences))
    kept = live.post(
        "/v1/completions", prompt=PROMPTS[0], include_stop_str_in_output=True, **fields, **more
    ).json()
    assert [c["text"] for c in kept["choices"]] == [tokenizer.decode(s) for s in sequences[:4]]
    text = tokenizer.decode(PROMPTS[1])
    body = {"messages": [{"role": "user", "content": text}], "length_penalty": 2.0, "early_stopping": "never"}
    chat = live.post("/v1/chat/completions", **body, **fields, **more).json()
    assert [c["token_ids"] for c in chat["choices"]] == wanted(model, PROMPTS[1], 4, 2.0, "never")[0]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"stream": True}, "stream"),
        ({"top_p": 0.5}, "top_p"),
        ({"temperature": 0.7}, "temperature"),
        ({"logprobs": 1}, "logprobs"),
        ({"stop": "x"}, "stop"),
        ({"best_of": 3}, "best_of"),
        ({"guided_regex": "a+"}, "guided_regex"),
        ({"n": 15}, "n"),
        ({"early_stopping": "soon"}, "early_stopping"),
        ({"use_beam_search": False, "length_penalty": 2.0}, "length_penalty"),
    ],
)
def test_what_cannot_go_with_it_is_refused_by_name(live: Live, fields: dict[str, Any], param: str) -> None:
    reply = live.post("/v1/completions", prompt="ab", **{"use_beam_search": True, **fields})
    assert reply.status_code == 400 and reply.json()["error"]["param"] == param, reply.text
