"""/v1/embeddings through OpenAI's SDK, over the engine of a tiny encoder, against transformers."""

import base64
from collections.abc import Iterator
from typing import Any

import numpy as np
import openai
import pytest
import torch

from compilerllm.models.model import capture_checkpoint
from compilerllm.models.resolve import resolve
from compilerllm.server.config import ServerConfig
from compilerllm.text.tokenizer import Tokenizer
from tests.models.test_encoders import BATCH, engine, save
from tests.server.conftest import Live, serve


@pytest.fixture(scope="module")
def embedder(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Live, Any]]:
    folder = tmp_path_factory.mktemp("bert")
    model = save(folder, "bert", "embed")
    pooling = engine(capture_checkpoint(resolve(str(folder)), task="embed"))
    with serve(tokenizer, ServerConfig(port=0), pooling) as live:
        yield live, model


def wanted(model: Any, prompt: list[int], dimensions: int = 64) -> Any:
    with torch.no_grad():
        states = model(torch.tensor([prompt])).last_hidden_state[0]
    return states


def embed(live: Live, **fields: Any) -> Any:
    return live.client.embeddings.create(model="fake", **fields)


def test_vectors_come_in_order_and_in_both_encodings(embedder: tuple[Live, Any]) -> None:
    live, model = embedder
    facts = live.engine.ready.pooling
    answer = embed(live, input=BATCH)
    assert [d.index for d in answer.data] == list(range(len(BATCH)))
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(map(len, BATCH))
    for prompt, item in zip(BATCH, answer.data, strict=True):
        states = wanted(model, prompt)
        row = {"mean": states.mean(0), "cls": states[0], "last": states[-1]}[facts.pooling].numpy()
        row = row / np.linalg.norm(row) if facts.normalize else row
        np.testing.assert_allclose(item.embedding, row, atol=1e-4)
    one = embed(live, input=BATCH[0], encoding_format="base64").data[0].embedding
    np.testing.assert_allclose(
        np.frombuffer(base64.b64decode(one), "<f4"), answer.data[0].embedding, atol=1e-6
    )


def test_fewer_dimensions_are_the_first_ones_made_unit_length(embedder: tuple[Live, Any]) -> None:
    live, _ = embedder
    whole = np.array(embed(live, input=BATCH[0]).data[0].embedding)[:8]
    short = embed(live, input=BATCH[0], dimensions=8).data[0].embedding
    np.testing.assert_allclose(short, whole / np.linalg.norm(whole), atol=1e-5)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": [[]]}, "input"),
        ({"input": [{"a": 1}]}, "input"),
        ({"input": [[5] * 200]}, "input"),
        ({"input": [5], "dimensions": 65}, "dimensions"),
        ({"input": [5], "dimensions": 0}, "dimensions"),
        ({"input": [5], "encoding_format": "hex"}, "encoding_format"),
        ({"input": [5], "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"input": [5], "colour": "red"}, "colour"),
    ],
)
def test_bad_requests_name_the_field(embedder: tuple[Live, Any], fields: dict[str, Any], param: str) -> None:
    reply = embedder[0].post("/v1/embeddings", **fields)
    assert reply.status_code == 400 and reply.json()["error"]["param"] == param, reply.text


def test_truncation_makes_it_fit(embedder: tuple[Live, Any]) -> None:
    live, _ = embedder
    cut = embed(live, input=[[5] * 200], extra_body={"truncate_prompt_tokens": -1})
    assert cut.usage.prompt_tokens == live.engine.ready.max_model_len


def test_a_model_does_what_it_is_for(embedder: tuple[Live, Any], live: Live) -> None:
    with pytest.raises(openai.BadRequestError, match="no text"):
        embedder[0].client.completions.create(model="fake", prompt=[5, 6])
    with pytest.raises(openai.BadRequestError, match="chat/completions"):
        embed(live, input="hello")


def test_metrics_count_what_is_pooled(embedder: tuple[Live, Any]) -> None:
    live, _ = embedder

    def value(name: str) -> float:
        lines = live.http.get("/metrics").text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(f"compilerllm:{name}"))

    names = (
        'request_success_total{engine="0",finished_reason="stop"', "e2e_request_latency_seconds_count",
        "request_prompt_tokens_count", "request_queue_time_seconds_count", "request_prefill_time_seconds_count",
    )  # fmt: skip
    before, tokens = [value(name) for name in names], value("request_prompt_tokens_sum")
    embed(live, input=BATCH)
    assert [value(name) - b for name, b in zip(names, before, strict=True)] == [len(BATCH)] * len(names)
    assert value("request_prompt_tokens_sum") - tokens == sum(map(len, BATCH))
