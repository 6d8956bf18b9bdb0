"""``compilerllm bench``: what it prints and writes, over the fake model."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from compilerllm.benchmark import percentile, read_floor, timed_run
from compilerllm.cli import bench_kernels, bench_latency, bench_startup, bench_throughput
from compilerllm.cli.main import main
from compilerllm.config import CacheConfig, EngineConfig, SchedulerConfig
from compilerllm.errors import GenerationFailed
from compilerllm.llm import LLM
from compilerllm.runtime.engine import InProcessEngine
from compilerllm.text.absent import NoTokenizer
from tests.runtime.fake_model import PAGED, POISON, FakeModel, generate_alone
from tests.runtime.test_engine import GREEDY

Run = Callable[..., tuple[int, list[str], str]]


class Floored(FakeModel):
    """A model that knows its weights' bytes."""

    weight_bytes = 2_000_000

    def read_bandwidth(self) -> float:
        return 4.0


@dataclass(frozen=True)
class Time:
    kernel: str
    node: str
    launches: int
    microseconds: float
    nbytes: float
    flops: float


class Timer(Floored):
    peak_bandwidth = 4000.0
    peak_tflops = 700.0

    def time_kernels(self, sequences: int, query: int, context: int) -> list[Time]:
        return [
            Time("norm", "layer.norm", 2, 1.0, 2e6, 0),
            Time("gemv", "layer.qkv", 32, 10.0 * sequences * query, 3.6e7, 1e9),
        ]


def llm_of(model: FakeModel) -> LLM:
    model.vocab_size = POISON - 1
    engine = InProcessEngine(
        model, SchedulerConfig(max_num_seqs=4), CacheConfig(num_blocks=80, enable_prefix_caching=False)
    )
    llm = LLM.over(engine, NoTokenizer(Path()))
    llm.model = model
    return llm


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    def run(model: FakeModel, *arguments: str) -> tuple[int, list[str], str]:
        opened = EngineConfig.create(model="m", max_num_seqs=4), llm_of(model)
        for module in (bench_latency, bench_throughput, bench_kernels):
            monkeypatch.setattr(module, "open_quietly", lambda args: opened)
        status = main(["bench", *arguments])
        out, err = capsys.readouterr()
        return status, out.splitlines(), err

    return run


def test_latency_prints_a_table_and_appends_one_line(bench: Run, tmp_path: Path) -> None:
    output = tmp_path / "results.jsonl"
    flags = ("--batch-sizes", "1,3", "--input-len", "5", "--output-len", "6", "--output", str(output))
    for _ in range(2):
        status, out, _ = bench(Floored(), "latency", "m", *flags)
        assert status == 0
    assert out[0].split()[:1] == ["batch"] and [line.split()[0] for line in out[1:3]] == ["1", "3"]
    assert out[3].startswith("floor: 2.0 MB of weights at 4.0 GB/s, 0.500 ms")
    record = json.loads(out[-1])
    assert [json.loads(line)["benchmark"] for line in output.read_text().splitlines()] == ["latency"] * 2
    assert [r["batch"] for r in record["results"]] == [1, 3]
    for result in record["results"]:
        assert result["cached_tokens"] == 0 and result["share_of_floor"] > 0
        assert result["p50_ms"] <= result["p90_ms"] <= result["p99_ms"]


def test_latency_without_a_floor(bench: Run) -> None:
    _, out, _ = bench(FakeModel(), "latency", "m", "--input-len", "5", "--output-len", "2")
    assert out[1].split()[-1] == "-" and json.loads(out[-1])["floor"] is None


def test_throughput_of_made_up_prompts(bench: Run) -> None:
    flags = ("--num-prompts", "9", "--input-len", "3:9", "--output-len", "2:6", "--seed", "4")
    record = json.loads(bench(FakeModel(), "throughput", "m", *flags)[1][-1])
    again = json.loads(bench(FakeModel(), "throughput", "m", *flags)[1][-1])
    assert record["requests"] == 9 and 27 <= record["prompt_tokens"] <= 81
    assert record["output_tokens"] == again["output_tokens"], "a seed repeats"


def test_throughput_of_a_dataset(bench: Run, tmp_path: Path) -> None:
    dataset = tmp_path / "prompts.jsonl"
    dataset.write_text('{"prompt": [1, 2, 3], "max_tokens": 5}\n\n{"prompt": [4]}\n')
    flags = ("throughput", "m", "--dataset", str(dataset), "--output-len", "2")
    record = json.loads(bench(FakeModel(), *flags)[1][-1])
    assert (record["requests"], record["prompt_tokens"], record["output_tokens"]) == (2, 4, 7)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no prompts"),
        ('{"prompt": ', "line 1, begins like JSON"),
        ('{"text": "a"}', "line 1: wanted is"),
        ('{"prompt": "a", "max_tokens": 0}', "line 1: wanted is"),
        ("Hello", "no tokenizer"),
    ],
)
def test_a_dataset_that_cannot_be_used(bench: Run, tmp_path: Path, text: str, message: str) -> None:
    dataset = tmp_path / "prompts.jsonl"
    dataset.write_text(text)
    status, _, err = bench(FakeModel(), "throughput", "m", "--dataset", str(dataset))
    assert status == 1 and message in err


def test_kernels_by_their_share_of_the_step(bench: Run) -> None:
    status, out, _ = bench(Timer(), "kernels", "m", "--batch-size", "1")
    assert status == 0 and out[1].split()[:3] == ["gemv", "layer.qkv", "32"] and out[1].endswith("90%")
    assert "sum of all launches: 0.322 ms" in out[3]
    record = json.loads(out[-1])
    assert [k["gb_per_second"] for k in record["kernels"]] == [3600.0, 2000.0]
    assert record["kernels"][0]["tflops"] == 100.0


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (("kernels", "m"), 1, "take level 1 or above"),
        (("latency", "m", "--input-len", "40", "--output-len", "20"), 2, "60 tokens, but the context ends at 48"),
        (("latency", "m", "--batch-size", "1"), 2, "did you mean --batch-sizes?"),
        (("latency", "m", "--batch-sizes", "1,x"), 2, "'x' is no whole number"),
        (("throughput", "m", "--input-len", "9:3"), 2, "9 is more than 3"),
        (("latency", "m", "--input-len", "4", "--output-len", "2", "--output", "/proc/none/x"), 1, "cannot write"),
        ((), 2, "KIND"),
        (("zzz",), 2, "invalid choice"),
    ],
)  # fmt: skip
def test_mistakes_are_explained(bench: Run, arguments: tuple[str, ...], status: int, message: str) -> None:
    found, _, err = bench(FakeModel(), *arguments)
    assert found == status and message in err


def test_startup_times_a_cold_and_a_warm_process(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    caches: list[str] = []

    def probe(options: str, cache: str) -> dict[str, Any]:
        caches.append(cache)
        assert json.loads(options)["max_num_seqs"] == 3
        return {"total": 1.0 + len(caches), "parts": {"import": 0.5, "compile": 0.1 * len(caches)}}

    monkeypatch.setattr(bench_startup, "probe", probe)
    assert main(["bench", "startup", "m", "--rounds", "2", "--max-num-seqs", "3"]) == 0
    record = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert caches[0] == caches[1] != caches[2] == caches[3]
    assert (record["cold"]["total_s"], record["warm"]["total_s"]) == (3.0, 4.0)
    assert record["warm"]["parts_s"] == {"import": 0.5, "compile": 0.3}


def test_a_start_that_fails_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "startup", "./nowhere"]) == 1
    assert "did not start: ./nowhere does not exist" in capsys.readouterr().err


def test_a_timed_run_sees_every_token() -> None:
    llm = llm_of(FakeModel())
    run = timed_run(llm.engine, [[3, 1, 4], [5]], [12, 2])
    assert run.tokens[0] == generate_alone(PAGED, [3, 1, 4], GREEDY, 48)[0]
    assert (len(run.first), len(run.gaps), run.output_tokens) == (2, 12, 14)
    assert 0 < max(run.first) < run.seconds
    with pytest.raises(GenerationFailed, match="prompt 0 got 8 of 12 tokens"):
        timed_run(llm.engine, [[1] * 40], [12])


def test_percentiles_and_floors() -> None:
    assert [percentile([4.0, 1.0, 3.0, 2.0], p) for p in (1, 50, 75, 99)] == [1.0, 2.0, 3.0, 4.0]
    assert read_floor(object()) is None
