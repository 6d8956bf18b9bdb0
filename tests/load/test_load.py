"""``bench serve``: arrivals, datasets and figures against what they must be; the command against a live server."""

import itertools
import json
import math
import statistics
from pathlib import Path
from typing import Any

import pytest

from compilerllm.benchmark import DatasetInvalid
from compilerllm.cli.main import main
from compilerllm.load.arrivals import arrival_times
from compilerllm.load.datasets import Ask, draw, read_prompts
from compilerllm.load.report import Result, meets, summary
from compilerllm.load.run import Timing
from tests.server.conftest import Live, Start


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 9.0])
def test_gaps_have_the_mean_and_spread_of_their_distribution(burstiness: float) -> None:
    times = arrival_times(20_001, 8.0, burstiness, seed=3)
    gaps = [b - a for a, b in itertools.pairwise(times)]
    assert times[0] == 0 and min(gaps) >= 0
    assert statistics.fmean(gaps) == pytest.approx(1 / 8, rel=0.05)
    spread = statistics.stdev(gaps) / statistics.fmean(gaps)
    assert spread == pytest.approx(burstiness**-0.5, rel=0.1), "of a gamma distribution"


def test_arrivals_at_once_and_arrivals_again() -> None:
    assert arrival_times(3, math.inf) == [0, 0, 0] and arrival_times(0, 2.0) == []
    assert arrival_times(9, 2.0, seed=1) == arrival_times(9, 2.0, seed=1) != arrival_times(9, 2.0, seed=2)


def drawn(count: int = 40, **changed: Any) -> list[Ask]:
    given: dict[str, Any] = {
        "dataset": None, "count": count, "input_len": (3, 7), "output_len": (2, 4), "prefix_len": 0, "num_prefixes": 1,
        "vocab_size": 50, "seed": 0, "chat": False,
    }  # fmt: skip
    return draw(**{**given, **changed})


def test_random_prompts_have_the_lengths_asked_for_and_share_prefixes() -> None:
    asks = drawn()
    assert {len(a.prompt) for a in asks} == set(range(3, 8)) and {a.max_tokens for a in asks} == {2, 3, 4}
    assert all(0 <= t < 50 for a in asks for t in a.prompt if isinstance(t, int))
    assert asks == drawn() and asks != drawn(seed=1)
    shared = drawn(prefix_len=20, num_prefixes=4)
    assert len({tuple(a.prompt[:20]) for a in shared}) == 4 and len({tuple(a.prompt) for a in shared}) == 40
    chats = drawn(chat=True, prefix_len=2)
    assert {len(str(a.prompt).split()) for a in chats} == set(range(5, 10))


def test_sharegpt(tmp_path: Path) -> None:
    file = tmp_path / "talks.json"
    talks = [
        [("human", "Hello?"), ("gpt", "x" * 40)],
        [("human", "Alone")],
        [("human", "Again?"), ("gpt", "no")],
    ]
    file.write_text(json.dumps([{"conversations": [{"from": f, "value": v} for f, v in t]} for t in talks]))
    assert read_prompts(file) == [("Hello?", 10), ("Again?", 4)]
    assert sorted(a.max_tokens for a in drawn(4, dataset=file)) == [4, 4, 10, 10]
    lines = tmp_path / "prompts.jsonl"
    lines.write_text('plain text\n{"prompt": [1, 2], "max_tokens": 5}\n')
    assert read_prompts(lines) == [("plain text", None), ([1, 2], 5)]


@pytest.mark.parametrize(
    "text", ["", "{}", "[]", '[{"conversations": []}]', '[{"conversations": [1, 2]}]', "[3]"]
)
def test_a_dataset_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(DatasetInvalid):
        read_prompts(tmp_path / "x.json")


def test_figures_of_made_up_timings() -> None:
    timings = [Timing(0, 0.1 * i, 0.1 * i + 0.9, [0.1] * 9, 5, 10) for i in range(1, 11)]
    result = Result(2.0, 4.0, [*timings, Timing(0, error="refused"), Timing(0, 0.1, 0.1, [], 5, 1)])
    assert result.completed == 11 and len(result.values("itl")) == 90
    assert result.values("tpot") == pytest.approx([100.0] * 10), "a single token has none"
    ttft = summary(result.values("ttft"))
    assert (ttft["p50"], ttft["p90"], ttft["p99"]) == pytest.approx((500.0, 900.0, 1000.0))
    assert result.goodput({"ttft": 301.0}) == pytest.approx(4 / 4.0), "of 0.1, 0.2, 0.3 and the single token"
    assert result.goodput({"ttft": 301.0, "tpot": 99.0}) == pytest.approx(1 / 4.0)
    assert result.goodput({"e2e": 1150.0}) == pytest.approx(3 / 4.0)
    assert not meets(Timing(0, error="refused"), {})
    assert math.isnan(summary([])["p99"])


def bench(live: Live, *flags: str, output: tuple[int, int] = (3, 5)) -> int:
    lengths = ("--input-len", "4:9", "--output-len", f"{output[0]}:{output[1]}", "--vocab-size", "60")
    return main(["bench", "serve", "--url", live.url, "--num-prompts", "12", *lengths, *flags])


@pytest.mark.parametrize("endpoint", ["/v1/completions", "/v1/chat/completions"])
def test_a_sweep_over_a_live_server(
    start: Start, endpoint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    live = start(step_seconds=0.01)
    goals = ("--goodput", "ttft:60000", "tpot:0.001")
    output = tmp_path / "results.jsonl"
    assert (
        bench(live, "--endpoint", endpoint, "--request-rate", "100,inf", *goals, "--output", str(output)) == 0
    )
    lines = capsys.readouterr().out.splitlines()
    record = json.loads(lines[-1])
    assert output.read_text() == lines[-1] + "\n"
    assert [r["request_rate"] for r in record["runs"]] == [100.0, "inf"]
    assert lines[0].split()[0] == "rate" and lines[0].split()[-1] == "goodput/s"
    requests = live.engine.seen[2:]  # after the two that warm up
    for number, run in enumerate(record["runs"]):
        sent = requests[12 * number : 12 * number + 12]
        assert (run["completed"], run["failed"], run["goodput_per_second"]) == (12, 0, 0)
        assert run["output_tokens"] == sum(r.params.max_tokens for r in sent)
        assert all(r.params.ignore_eos and r.params.temperature == 0 for r in sent)
        # Tokens are 10 ms apart at least, whatever else the machine does.
        assert run["tpot_p50_ms"] >= 9 and run["e2e_p50_ms"] >= run["ttft_p50_ms"] + 18
    assert live.engine.seen[2].prompt_token_ids == live.engine.seen[14].prompt_token_ids, (
        "rates get the same work"
    )


def test_no_more_are_open_than_allowed(start: Start) -> None:
    live = start(step_seconds=0.005, max_open_requests=3)
    assert bench(live, "--max-concurrency", "3") == 0
    assert len(live.engine.seen) == 14, "one more at a time would have been refused"


def test_failures_are_counted_and_told(start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    live = start(max_model_len=10)
    assert bench(live, "--num-warmups", "0", output=(9, 9)) == 1
    out = capsys.readouterr().out
    assert "maximum context length" in out and json.loads(out.splitlines()[-1])["runs"][0]["failed"] == 12


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--request-rate", "0"), "no number above 0"),
        (("--request-rate", "1,x"), "no number above 0"),
        (("--goodput", "speed:3"), "no goal"),
        (("--plot", "x.txt"), ".png"),
        (("--prefix-len", "-1"), "negative"),
        (("--max-num-seqs", "3"), "--url"),
    ],
)
def test_flags_that_make_no_sense(
    live: Live, flags: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(live, *flags) in (1, 2)
    assert says in capsys.readouterr().err


def test_the_plot_is_a_picture(start: Start, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert bench(start(), "--request-rate", "50,inf", "--plot", str(tmp_path / "x.png")) == 0
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
