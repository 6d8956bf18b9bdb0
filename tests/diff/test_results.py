"""Benchmark results: which figures they have, which moved, and what that means for the exit status."""

import json
from pathlib import Path
from typing import Any

import pytest

from compilerllm.cli.main import main
from compilerllm.diff.results import ResultsInvalid, compare_results, figures_of, gather, read_results

H200 = Path(__file__).parents[2] / "benchmarks/results/h200.jsonl"


def write(path: Path, *records: dict[str, Any]) -> str:
    path.write_text("a table for people\n" + "".join(json.dumps(r) + "\n" for r in records))
    return str(path)


def latency(*steps: float, batch: int = 1) -> dict[str, Any]:
    """As ``bench latency`` writes it."""
    entry = {"batch": batch, "first_token_ms": 9.0, "per_token_ms": sorted(steps)[len(steps) // 2],
             "per_token_ms_all": list(steps), "p99_ms": 3.0, "tokens_per_second": 1.0, "share_of_floor": 0.5, "cached_tokens": 0}  # fmt: skip
    return {"benchmark": "latency", "model": "m", "target": "cpu-avx2", "input_len": 8, "output_len": 8, "repetitions": len(steps),
            "floor": {"weight_bytes": 5, "floor_ms": 1.0}, "results": [entry]}  # fmt: skip


def test_a_real_regression_is_found(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Llama-3.1-8B decoded slower at batch 1 at de77081 than at 89a2e84, and faster at 64: benchmarks/results/h200_notes.md."""
    out = tmp_path / "diff.json"
    assert main(["diff", f"{H200}@89a2e84", f"{H200}@de77081", "--json", str(out)]) == 1
    figures = {
        (
            f["workload"].partition("model=")[2].split()[0],
            f["workload"].partition("batch=")[2].split()[0],
            f["figure"],
        ): f
        for f in json.loads(out.read_text())["results"]
    }
    worse, better = figures["llama31-8b", "1", "tpot_ms"], figures["llama31-8b", "64", "tpot_ms"]
    assert (worse["old"], worse["new"]) == pytest.approx((3.9753, 4.185), abs=1e-4)
    assert worse["beyond_noise"] and 0.05 < worse["interval"][0] <= worse["worse_by"] < 0.055
    assert better["beyond_noise"] and better["change"] < -0.04
    shown = capsys.readouterr().out
    assert (
        "model=llama31-8b workload=decode1" in shown and "tpot_ms is worse by 5.3%, 3.975 -> 4.185" in shown
    )
    assert figures["qwen3-0.6b", "8", "tpot_ms"]["change"] < -0.2
    assert main(["diff", f"{H200}@89a2e84", f"{H200}@de77081", "--fail-above", "20%"]) == 0


def test_exit_status(tmp_path: Path) -> None:
    """A regression must be larger than asked for and beyond the interval; one sample is never beyond it."""
    old = write(tmp_path / "old.jsonl", latency(2.0, 2.01, 2.02))
    slower = write(tmp_path / "slower.jsonl", latency(2.2, 2.21, 2.22))
    noisy = write(tmp_path / "noisy.jsonl", latency(1.5, 2.2, 2.9))
    single = write(tmp_path / "single.jsonl", latency(4.0))
    assert main(["diff", old, slower]) == 1
    assert main(["diff", old, slower, "--fail-above", "0.2"]) == 0
    assert main(["diff", slower, old]) == 0
    assert main(["diff", old, noisy]) == 0
    assert main(["diff", old, single]) == 0
    assert main(["diff", old, old]) == 0


def test_usage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What cannot be compared is exit status 2, and says what there is."""
    old = write(tmp_path / "old.jsonl", latency(2.0, 2.1))
    other = write(tmp_path / "other.jsonl", latency(2.0, 2.1, batch=4))
    assert main(["diff", old, other]) == 2
    assert "no figure in common" in capsys.readouterr().err
    assert main(["diff", f"{H200}@0000000", f"{H200}@de77081"]) == 2
    assert "no results of commit 0000000; it has 89a2e84, de77081" in capsys.readouterr().err
    assert main(["diff", old, old, "--fail-above", "lots"]) == 2
    assert main(["diff", old]) == 2
    (tmp_path / "none.json").write_text('{"a": "b"}')
    assert main(["diff", str(tmp_path / "none.json"), old]) == 2
    (tmp_path / "broken.jsonl").write_text('{"a": 1}\n{"b": \n')
    with pytest.raises(ResultsInvalid, match="line 2"):
        read_results(tmp_path / "broken.jsonl")


def test_figures_of_what_bench_writes() -> None:
    """Samples are found beside their figure; what follows from it, and what describes the machine, is no figure."""
    found = {f.name: f for f in figures_of(latency(2.0, 2.2, 2.1, batch=8))}
    assert found["per_token_ms"].runs == [[2.0, 2.2, 2.1]] and "batch=8" in found["per_token_ms"].workload
    assert set(found) == {"per_token_ms", "first_token_ms"} or set(found) == {
        "per_token_ms",
        "first_token_ms",
        "p99_ms",
    }
    startup = {"benchmark": "startup", "model": "m", "rounds": 2, "cold": {"total_s": 11.0, "parts_s": {"import": 3.0}},
               "warm": {"total_s": 2.0, "parts_s": {"import": 1.0}}, "all_s": {"cold": [10.5, 11.5], "warm": [2.0, 2.1]}}  # fmt: skip
    by_workload = gather([startup])
    assert by_workload["benchmark=startup model=m name=cold", "total_s"].runs == [[10.5, 11.5]]
    throughput = {
        "benchmark": "throughput",
        "requests": 64,
        "seconds": 4.0,
        "seconds_all": [4.0, 4.2],
        "output_tokens_per_second": 9.0,
    }
    assert {f.name: f.runs for f in figures_of(throughput)} == {"seconds": [[4.0, 4.2]]}
    rate = figures_of({"benchmark": "x", "tok_s": 5.0, "samples": {"tok_s": [5.0, 6.0]}})
    assert rate[0].more_is_better and rate[0].runs == [[5.0, 6.0]]


def test_more_is_better() -> None:
    slow, fast = (
        {"benchmark": "x", "tok_s": v, "samples": {"tok_s": [v, v * 1.001]}} for v in (100.0, 120.0)
    )
    (faster,), _, _ = compare_results([slow], [fast])
    (slower,), _, _ = compare_results([fast], [slow])
    assert faster.worse_by < 0 and not faster.regressed(0.03)
    assert slower.regressed(0.03) and not slower.regressed(0.2)


def test_lines_of_one_workload_are_its_runs() -> None:
    figure = gather([latency(2.0, 2.1), latency(2.4, 2.5)])
    runs = next(f.runs for (_, name), f in figure.items() if name == "per_token_ms")
    assert runs == [[2.0, 2.1], [2.4, 2.5]]
