"""Choosing among rivals by whole steps: a clock that the test winds says what a kernel takes, and what it costs others."""

from pathlib import Path

import pytest

from compilerllm.compiled_cuda import CudaModel
from compilerllm.cuda_artifact import cuda_buckets
from compilerllm.kernels.launch.gpu.program import Program
from compilerllm.kernels.tuning import RivalChooser, TuningData
from compilerllm.step_tuning import NothingToTime, Wanted, figures, tune_steps
from tests.artifact.test_picks import Wound, boot, open_artifact

interpreted = pytest.importorskip("compilerllm.kernels.triton.interpreted_backend")
ALONE = {"slow": 30e-6, "fast": 10e-6, "middling": 20e-6, "": 5e-6}
STEPS = 100e-6  # that the fast way costs the kernels around it


@pytest.fixture
def artifact(tmp_path: Path) -> Path:
    return open_artifact(tmp_path)


def spiteful(monkeypatch: pytest.MonkeyPatch) -> Wound:
    """A clock by which the way that is fastest by itself makes the step slow."""
    return Wound(monkeypatch, lambda way: ALONE[way] + STEPS * (way == "fast"))


def tuned(model: CudaModel) -> tuple[Program, list[dict[str, str]], TuningData]:
    bench = model.bench()
    results = tune_steps(bench)
    known = TuningData("H200")
    for choice in bench.program.choices:
        fields = dict(part.split("=") for part in choice.problem.split(","))
        for config in choice.configs:
            known.add(choice.family, fields, config, ALONE[config["path"]] * 1e6)
    picked = [
        {
            bench.program.choices[c].problem: bench.program.choices[c].configs[k]["path"]
            for c, k in r.chosen.items()
        }
        for r in results
    ]
    return bench.program, picked, figures(known, bench.program, results)


def test_a_candidate_that_is_fast_alone_and_slow_in_a_step_loses(
    artifact: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    program, picked, data = tuned(boot(artifact, spiteful(monkeypatch), graphs=False))
    assert {way for step in picked for way in step.values()} == {"middling"}
    for choice in program.choices:
        timed = data.entries[choice.family][choice.problem]
        assert [t["config"]["path"] for t in timed] == ["middling", "slow", "fast"]
        assert timed[0]["step_us"] < timed[1]["step_us"] < timed[2]["step_us"]
        assert timed[0]["us"] == 20.0


def test_choices_of_other_families_stay(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = boot(artifact, spiteful(monkeypatch), graphs=False).bench()
    assert all(set(r.chosen.values()) == {0} and not r.seconds for r in tune_steps(bench, {"experts"}))


def test_rivals_are_close_and_of_every_kind() -> None:
    data, problem = TuningData("H200"), {"M": 1}
    times = [
        ("gemv", 1, 10.0),
        ("gemv", 2, 10.5),
        ("gemv", 3, 10.6),
        ("cublas", 0, 12.0),
        ("skinny", 0, 14.0),
    ]
    configs = [{"path": path, "warps": warps} for path, warps, _ in times]
    for config, (_, _, us) in zip(configs, times, strict=True):
        data.add("linear", problem, config, us)
    gemv, second, third, cublas, _ = configs
    assert RivalChooser(data, 3).offer("linear", problem, configs[::-1]) == [gemv, cublas, second]
    assert RivalChooser(data, 9).offer("linear", problem, configs) == [gemv, cublas, second, third]
    assert RivalChooser(data, 9).offer("linear", {"M": 2}, configs) == [configs[0]]
    data.add_step("linear", "M=1", third, 400.0)
    chooser = RivalChooser(data, 2)
    assert chooser.offer("linear", problem, configs) == [third, gemv]
    assert chooser.report()[0]["why"] == "timed in a step"


def test_figures_of_steps_survive_merging_and_writing(tmp_path: Path) -> None:
    old, newer = TuningData("H200"), TuningData("H200")
    for config, us in (({"a": 1}, 1.0), ({"a": 2}, 2.0)):
        old.add("linear", {"M": 1}, config, us)
    old.add_step("linear", "M=1", {"a": 2}, 50.0)
    newer.add("linear", {"M": 1}, {"a": 1}, 0.5)
    old.merge(newer)
    old.write(tmp_path / "data.json")
    assert TuningData.read(tmp_path / "data.json").find("linear", {"M": 1})[0] == [
        {"config": {"a": 2}, "us": 2.0, "step_us": 50.0},
        {"config": {"a": 1}, "us": 0.5},
    ]


def test_sizes_are_those_of_buckets() -> None:
    buckets = cuda_buckets(64, 2048)
    wanted = Wanted("m", "auto", [1, 64], [512], 3).buckets(buckets)
    assert [(b.tokens, b.max_query) for b in wanted] == [(1, 1), (64, 1), (512, 512)]
    with pytest.raises(NothingToTime, match="No step has 3 sequences: programs have 1, 2, 4, 8, 16, 24"):
        Wanted("m", "auto", [1, 3], [], 3).buckets(buckets)
    with pytest.raises(NothingToTime, match="Neither"):
        Wanted("m", "auto", [], [], 3).buckets(buckets)
