"""The server over a real engine process: what kill -9 in mid-stream does to clients, and that service returns."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from compilerllm.config import CacheConfig, EngineConfig, ModelConfig
from compilerllm.runtime.client import ProcessEngine, RestartPolicy
from compilerllm.sampling_params import SamplingParams
from compilerllm.server.config import ServerConfig
from tests.runtime.fake_model import PAGED, VOCAB, generate_alone
from tests.server.conftest import Live, serve
from tests.text.tiny_tokenizers import letters, save_tokenizer

RUNTIME_TESTS = Path(__file__).parents[1] / "runtime"


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Live, ProcessEngine]]:
    monkeypatch.setenv("PYTHONPATH", str(RUNTIME_TESTS))
    config = EngineConfig(ModelConfig("delay=0.01"), CacheConfig(num_blocks=400))
    engine = ProcessEngine(
        config, factory="fake_model:load", restarts=RestartPolicy(most=2, first_delay=0.05)
    )
    engine.start(60)
    try:
        with serve(
            save_tokenizer(letters(VOCAB), tmp_path, eos_token="<|end|>"), ServerConfig(port=0), engine
        ) as live:
            yield live, engine
    finally:
        engine.close()


def test_killed_in_mid_stream(served: tuple[Live, ProcessEngine]) -> None:
    live, engine = served
    ask = {
        "model": "fake",
        "prompt": "abc",
        "max_tokens": 300,
        "temperature": 0.0,
        "extra_body": {"ignore_eos": True},
    }
    stream = live.client.completions.create(**ask, stream=True)  # type: ignore[call-overload]
    for _, _ in zip(range(5), stream, strict=False):
        pass
    assert engine.pid is not None
    os.kill(engine.pid, signal.SIGKILL)
    with pytest.raises(openai.APIError, match="engine ended"):
        for _ in stream:
            pass
    assert live.http.get("/health").status_code == 503
    live.wait_until(lambda: live.http.get("/health").status_code == 200, 30)
    answer = live.client.completions.create(**{**ask, "max_tokens": 8})  # type: ignore[call-overload]
    ids = [ord(c) - ord("a") + 1 for c in answer.choices[0].text]
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    assert ids == [t for t in generate_alone(PAGED, [1, 2, 3], params, 400)[0] if t]


def test_a_client_that_hangs_up_frees_the_engine(served: tuple[Live, ProcessEngine]) -> None:
    live, engine = served
    body = {"prompt": "abc", "max_tokens": 300, "ignore_eos": True, "stream": True}
    with live.http.stream("POST", "/v1/completions", json=body) as answer:
        next(answer.iter_lines())
    live.wait_until(lambda: engine.stats.num_running == 0 and engine.stats.blocks_used == 0, 10)
    assert "compilerllm:num_requests_running" in live.http.get("/metrics").text
