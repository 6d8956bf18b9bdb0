"""First boot: candidates are timed by a clock that the test winds, kept in a file, found there by the next start."""

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compilerllm.artifact import write_manifest
from compilerllm.compiled_cuda import CudaModel, CudaOptions
from compilerllm.ir.step import Bucket
from compilerllm.kernels.launch.gpu.program import Choice, Kernel, Launch, Plan, Program
from compilerllm.picks import Bench, Picks, best, full_step, measure, picks_file
from tests.kernels.gpu.greedy import GreedySampler
from tests.kernels.gpu.tiny import (
    VOCAB,
    IdentitySource,
    greedy,
    make_kernels,
    make_program,
    step_of,
    write_artifact,
)

interpreted = pytest.importorskip("compilerllm.kernels.triton.interpreted_backend")
BUCKETS = (Bucket(1, 1, 1, 1), Bucket(4, 4, 4, 1), Bucket(16, 4, 4, 16), Bucket(64, 4, 4, 64))
GATHER, MATMUL = 2, 3  # kernels of the tiny program
CONFIGS = tuple({"path": name} for name in ("slow", "fast", "middling"))
ALWAYS = 1e9  # seconds: the interpreter is no GPU


def with_choices(buckets: tuple[Bucket, ...]) -> Program:
    """The tiny program, whose gather and product each come in three ways; equal ones, under other names."""
    kernels = make_kernels(None)
    names = ["slow", "fast", "middling"]
    gathers = [replace(kernels[GATHER], name=f"gather_{n}") for n in names]
    products = [replace(kernels[MATMUL], constexprs=(*kernels[MATMUL].constexprs, ("way", n))) for n in names]
    program = make_program(buckets, (*kernels[:2], *gathers, *products))
    plans, choices = [], []
    for plan in program.plans:
        write, read, gather, product = plan.launches
        open_: list[Launch] = []
        for launch, first in ((gather, 2), (product, 5)):
            choices.append(Choice("linear", f"M={plan.bucket.tokens},kernel={first}", CONFIGS))
            open_ += [replace(launch, kernel=first + i, pick=(len(choices) - 1, i)) for i in range(3)]
        plans.append(Plan(plan.bucket, plan.arena_bytes, (write, read, *open_)))
    return Program(program.kernels, tuple(plans), program.counters, choices=tuple(choices))


def way_of(kernel: Kernel) -> str:
    return kernel.name.partition("_")[2] or str(dict(kernel.constexprs).get("way", ""))


class Wound:
    """A clock that kernels wind on by what the test says they take, and what ran. Until ``real``, they do nothing else."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds: Callable[[str], float]) -> None:
        self.now, self.ran, self.real = 0.0, list[str](), False
        run = interpreted.run_kernel

        def timed(kernel: Kernel, grid: Any, values: Any) -> None:
            if self.real:
                run(kernel, grid, values)
            self.ran.append(way_of(kernel))
            self.now += seconds(way_of(kernel))

        monkeypatch.setattr(interpreted, "run_kernel", timed)

    def __call__(self) -> float:
        return self.now


TIMES = {"slow": 30e-6, "fast": 10e-6, "middling": 20e-6, "": 5e-6}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Wound:
    return Wound(monkeypatch, lambda way: TIMES[way])


def boot(folder: Path, clock: Wound, **options: Any) -> CudaModel:
    backend = interpreted.InterpretedBackend()
    backend.clock = clock
    model = CudaModel.load(
        folder, IdentitySource(), backend=backend, sampler=GreedySampler, options=CudaOptions(max_graph_tokens=16, **options)
    )  # fmt: skip
    model.allocate(8, 4)
    return model


def open_artifact(tmp_path: Path) -> Path:
    """An artifact of the tiny program, every choice of it open."""
    folder = tmp_path / "artifact"
    folder.mkdir()
    manifest = write_artifact(folder, BUCKETS)
    (folder / "program.json").write_text(json.dumps(with_choices(BUCKETS).to_json()))
    write_manifest(folder, manifest | {"peak_bandwidth": 4000.0, "peak_tflops": 700.0})
    return folder


@pytest.fixture
def artifact(tmp_path: Path) -> Path:
    return open_artifact(tmp_path)


def ways(model: CudaModel) -> set[str]:
    return {way_of(k) for k in model.program.kernels} - {""}


def generate(model: CudaModel, clock: Wound) -> None:
    """A step, by the picked program."""
    clock.real = True
    sampled = model.enqueue(step_of([(0, [7, 9, 1], 0, [3])]), greedy([0])).result()
    assert sampled is not None and sampled.token_ids.tolist() == [17 % VOCAB]
    clock.real = False


def test_the_first_start_measures_and_later_ones_know(
    artifact: Path, tmp_path: Path, clock: Wound, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    picks = tmp_path / "picks"
    model = boot(artifact, clock, pick_seconds=ALWAYS, picks=picks)
    assert ways(model) == {"fast"} and not model.program.choices
    assert (model.picks.measured, model.picks.kept, model.picks.open) == (8, 0, 0)
    assert "8 measured in" in model.picks.text()
    generate(model, clock)
    (file,) = picks.iterdir()
    manifest = json.loads((artifact / "manifest.json").read_text())
    assert file == picks_file(picks, manifest["id"], "interpreter")
    entry = json.loads(file.read_text())["choices"][0]
    assert entry["config"] == {"path": "fast"} and entry["us"] == {"0": 30.0, "1": 10.0, "2": 20.0}
    clock.ran.clear()
    again = boot(artifact, clock, pick_seconds=ALWAYS, picks=picks)
    assert set(clock.ran) == {"", "fast"}, "what is known was measured again"
    assert again.program == model.program and again.picks.text() == "8 from an earlier start"
    generate(again, clock)


def test_the_default_candidates_run_where_nothing_may_differ(
    artifact: Path, tmp_path: Path, clock: Wound
) -> None:
    """Neither measured, nor read, nor written."""
    boot(artifact, clock, pick_seconds=ALWAYS, picks=tmp_path / "picks")
    clock.ran.clear()
    model = boot(artifact, clock, pick_seconds=0.0, picks=tmp_path / "picks")
    assert ways(model) == {"slow"} and set(clock.ran) == {"", "slow"}
    assert model.picks.text() == "8 by default"
    generate(model, clock)
    boot(artifact, clock, pick_seconds=0.0, picks=tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_a_folder_that_cannot_be_written_is_a_line_in_the_log(
    artifact: Path, tmp_path: Path, clock: Wound, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    (tmp_path / "file").write_text("")
    model = boot(artifact, clock, pick_seconds=ALWAYS, picks=tmp_path / "file" / "picks")
    assert ways(model) == {"fast"}
    assert "Picks cannot be kept" in caplog.text and "the next start measures again" in caplog.text


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "holds no picks"),
        ('{"format": 9, "choices": []}', "another format"),
        ('{"format": 1, "choices": [{"family": "linear", "problem": "M=1,kernel=2", "config": {"path": "odd"}}]}', "no candidate"),
    ],
)  # fmt: skip
def test_a_file_of_something_else_is_told_and_replaced(
    artifact: Path, tmp_path: Path, clock: Wound, caplog: pytest.LogCaptureFixture, text: str, says: str
) -> None:
    manifest = json.loads((artifact / "manifest.json").read_text())
    file = picks_file(tmp_path, manifest["id"], "interpreter")
    file.write_text(text)
    model = boot(artifact, clock, pick_seconds=ALWAYS, picks=tmp_path)
    assert says in caplog.text and str(file) in caplog.text
    assert ways(model) == {"fast"} and model.picks.measured == 8
    assert len(json.loads(file.read_text())["choices"]) == 8


def test_smaller_limits_need_fewer_buckets_and_leave_the_others_figures_alone(
    artifact: Path, tmp_path: Path, clock: Wound
) -> None:
    """A start with fewer buckets measures theirs; one with more adds what is missing."""
    some = boot(artifact, clock, pick_seconds=ALWAYS, picks=tmp_path, buckets=BUCKETS[:3:2])
    assert some.buckets == BUCKETS[:3:2] and len(some.graphs) == 2 + 1
    assert (some.picks.measured, some.picks.kept) == (4, 0)
    every = boot(artifact, clock, pick_seconds=ALWAYS, picks=tmp_path)
    assert (every.picks.measured, every.picks.kept) == (4, 4)
    boot(artifact, clock, pick_seconds=ALWAYS, picks=tmp_path, buckets=BUCKETS[1:2])
    assert len(json.loads(next(tmp_path.glob("*interpreter.json")).read_text())["choices"]) == 8


def test_time_that_is_used_up_leaves_defaults(
    artifact: Path, clock: Wound, caplog: pytest.LogCaptureFixture
) -> None:
    """Small buckets come first; whoever measures nothing says so."""
    caplog.set_level(logging.INFO)
    model = boot(artifact, clock, pick_seconds=1e-9)
    assert (model.picks.measured, model.picks.open) == (2, 6)
    assert "6 choices were not measured" in caplog.text
    assert ways(model) == {"fast", "slow"} and [way_of(model.program.kernels[x.kernel]) for x in model.program.plans[0].launches] == ["", "", "fast", "fast"]  # fmt: skip
    generate(model, clock)


@pytest.mark.parametrize(
    ("times", "winner"),
    [
        ({0: 10.0, 1: 9.9}, 0),
        ({0: 10.0, 1: 9.0, 2: 9.5}, 1),
        ({0: 1.0, 1: 1.0}, 0),
        ({0: 3.0, 1: 2.0, 2: 2.0}, 1),
    ],
)
def test_a_candidate_must_be_faster_by_more_than_chance(times: dict[int, float], winner: int) -> None:
    assert best(times) == winner


def test_what_a_start_tells_of_its_picks() -> None:
    assert Picks().text() == ""
    assert Picks((0, 1, 2, 0), kept=1, measured=2, seconds=0.94).text() == (
        "2 measured in 0.9 s, 1 from an earlier start, 1 by default"
    )


class Recorded:
    """A device that notes which launches run, and takes a microsecond for each."""

    def __init__(self) -> None:
        self.spans: list[tuple[int, int]] = []
        self.passes: list[list[tuple[int, int]]] = []
        self.at, self.ticks = 0.0, list[float]()

    def run_part(self, first: int, last: int) -> None:
        self.spans.append((first, last))
        self.at += 1e-6 * (last - first)

    def stopwatch(self, ahead: float) -> "Recorded":
        self.spans, self.ticks = [], []
        self.passes.append(self.spans)
        assert 0 < ahead < 1
        return self

    def tick(self) -> None:
        self.ticks.append(self.at)

    def seconds(self) -> list[float]:
        return [b - a for a, b in zip(self.ticks, self.ticks[1:], strict=False)]


def layers(families: str, count: int) -> Program:
    """Layers of a plain launch and a node of two candidates, the second of them two launches; a head behind."""
    plain = Launch(0, (1, 1, 1), ())
    launches, choices = [], [Choice(f, f, ({"a": 0}, {"a": 1})) for f in families.split()]
    for _ in range(count):
        launches += [
            plain,
            replace(plain, pick=(0, 0)),
            replace(plain, pick=(0, 1)),
            replace(plain, pick=(0, 1)),
        ]
    launches += [plain, replace(plain, pick=(1, 0)), replace(plain, pick=(1, 1))]
    kernel = Kernel("k", "k", "m:k", ())
    return Program((kernel,), (Plan(BUCKETS[0], 0, tuple(launches)),), choices=tuple(choices))


def timed(
    program: Program, seconds: float
) -> tuple[dict[int, dict[int, float]], list[list[tuple[int, int]]]]:
    device = Recorded()
    bound: Any = device
    bench = Bench(program, bound, lambda i, plan: bound, lambda i: None, 4000.0, 700.0)
    return measure(bench, (), seconds), device.passes


def test_one_layer_or_a_few_are_enough_and_the_head_is_timed_alone() -> None:
    """A pass runs the plan's beginning with one candidate of each choice, then the first node of what is left."""
    program = layers("linear head", 9)
    times, passes = timed(program, ALWAYS)
    assert times == {
        0: {0: pytest.approx(1e-6), 1: pytest.approx(2e-6)},
        1: {0: pytest.approx(1e-6), 1: pytest.approx(1e-6)},
    }
    assert len(passes) == 4 and passes[0] == passes[1] and passes[2] == passes[3]
    plain = [(4 * i, 4 * i + 1) for i in range(9)]
    assert [s for s in passes[0] if s in plain] == plain, (
        "with time for all, all of it runs: the head is real"
    )
    few, passes = timed(program, 1e-9)
    assert few.keys() == times.keys()
    assert passes[0] == [(1, 2), (37, 38)] and passes[3] == [(2, 4), (38, 39)]


def test_what_addresses_memory_by_its_inputs_finds_real_ones() -> None:
    """Experts' numbers must be what the router wrote, so that the plan runs up to the node."""
    _, passes = timed(layers("experts head", 3), 1e-9)
    assert passes[0] == [(0, 1), (1, 2), (13, 14)]


def test_a_full_step_fills_its_bucket() -> None:
    class Space:
        vocab_size, max_model_len, num_blocks = 50, 40, 3
        groups = ()

    decode = full_step(Space(), BUCKETS[1])
    assert decode.seq_lens.tolist() == [40] * 4 and len(decode.token_ids) == 4
    prompts = full_step(Space(), Bucket(64, 4, 4, 64))
    assert np.diff(prompts.query_start).tolist() == [32, 32] and prompts.positions.max() == 31
