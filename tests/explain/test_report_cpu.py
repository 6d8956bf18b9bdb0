"""A CPU's artifact, explained and measured: stages to nodes, a timed build that computes the same, times that add up."""

import json
from pathlib import Path

import numpy as np
import pytest

from compilerllm.building import build
from compilerllm.compiled import CompiledModel
from compilerllm.compiler import CompileRequest
from compilerllm.explain.collect import Collected, Look, collect
from compilerllm.explain.cpu_timer import CpuKernelTimer
from compilerllm.explain.cpu_times import TimedModel, summarise, write_contexts
from compilerllm.explain.measure import CannotMeasure, measure, prediction_errors, with_stages
from compilerllm.explain.report import Report
from compilerllm.explain.steps import Step
from compilerllm.explain.text import render, render_errors
from compilerllm.kernel_times import made_up_step
from compilerllm.loading import load_compiled
from tests.models.tiny import tiny_model


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    tiny_model("llama").save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def artifact(place: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COMPILERLLM_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        return build(CompileRequest(str(place), max_num_seqs=4, max_num_batched_tokens=64), place)


@pytest.fixture(autouse=True)
def cache(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMPILERLLM_CACHE_DIR", str(artifact.parent.parent))


@pytest.fixture(scope="module")
def collected(artifact: Path) -> Collected:
    return collect(artifact, "tiny", Look(bandwidth=20.0, tflops=0.5))


@pytest.fixture(scope="module")
def model(artifact: Path, place: Path) -> CompiledModel:
    found = load_compiled(artifact, place)
    assert isinstance(found, CompiledModel)
    found.allocate(16, 4)
    return found


def test_every_stage_of_every_layer_is_a_launch(collected: Collected) -> None:
    report = collected.report
    assert [b.name for b in report.buckets] == ["decode-1", "decode-2", "decode-4", "mixed-64"]
    nodes = [report.nodes[x.node] for x in report.bucket("decode-4").launches]
    down = [n for n in nodes if n.path.endswith("mlp.down_proj")]
    assert [(n.layer, n.path) for n in down] == [(i, f"model.layers.{i}.mlp.down_proj") for i in range(3)]
    packed = next(n for n in nodes if "pack_projections" in n.passes and n.op == "linear")
    assert packed.modules == tuple(f"model.layers.0.self_attn.{p}_proj" for p in "qkv")
    launch = next(x for x in report.bucket("decode-4").launches if report.nodes[x.node] is down[0])
    assert (launch.nbytes, launch.flops) == (4 * (64 * 96 + 4 * 96 + 4 * 64), 2 * 4 * 64 * 96)  # float32
    assert launch.roofline_us == pytest.approx(launch.nbytes / 20e3, rel=1e-3)


def test_the_text_of_layouts_and_passes_is_there(collected: Collected) -> None:
    report = collected.report
    last = report.passes[-1]
    assert last.name == "select_layouts" and last.changed and "relayout(" in report.texts[last.after]
    assert Report.from_json(json.loads(json.dumps(report.to_json()))) == report
    assert "layers.*.mlp.{gate_proj, up_proj}" in render(report, 160)


def test_the_timed_program_computes_the_same_and_the_plain_one_has_no_clock(
    model: CompiledModel, artifact: Path
) -> None:
    assert "stamp" not in (artifact / "program.cpp").read_text()
    step = made_up_step(model, 2, 5, 37)
    write_contexts(model, step)
    model.forward(step)
    plain = np.array(model.logits())
    timed = TimedModel(model, artifact)
    stamps, nanoseconds = timed.run(step)
    np.testing.assert_array_equal(model.logits(), plain)
    assert len(stamps) == len(timed.timed.stages) + 2
    assert (np.diff(stamps) >= 0).all() and stamps[0] >= 0 and stamps[-1] * 1e3 <= nanoseconds
    model.forward(step)  # the plain program is back
    np.testing.assert_array_equal(model.logits(), plain)


def test_contexts_are_written_before_a_step_is_timed(model: CompiledModel) -> None:
    """A step whose context was written gives other logits than one over whatever lies in the caches."""
    step = made_up_step(model, 1, 1, 60)
    model.forward(step)
    before = np.array(model.logits())
    write_contexts(model, step)
    model.forward(step)
    assert not np.allclose(before, model.logits())


def test_measured_parts_add_up_to_the_step(collected: Collected, artifact: Path, place: Path) -> None:
    report = measure(collected, artifact, place, ("decode-1", "mixed-64"))
    assert [b.name for b in report.buckets if b.measured] == ["decode-1", "mixed-64"]
    for bucket in (report.bucket("decode-1"), report.bucket("mixed-64")):
        m = bucket.measured
        assert m is not None
        assert m.kernels_us == pytest.approx(sum(x.measured_us or 0 for x in bucket.launches), abs=0.1)
        assert m.wall_us == pytest.approx(m.kernels_us + sum(m.parts.values()) + m.unattributed_us, abs=0.01)
        starts = [x.start_us or 0.0 for x in bucket.launches]
        assert starts == sorted(starts) and starts[0] == 0
    text = render(report, 120, ["decode-1"])
    assert "unattributed" in text and "waking threads" in text and "mixed-64" in text
    errors = prediction_errors(report)
    assert errors[-1].family == "all" and "prediction error" in render_errors(errors)


def test_a_bucket_takes_one_time_a_launch(collected: Collected) -> None:
    times = summarise([(np.array([0.0, 1.0, 3.0]), 5000)])
    with pytest.raises(CannotMeasure, match="1 times for"):
        with_stages(collected.report.bucket("decode-1"), times)


def test_runs_far_from_the_middle_do_not_count() -> None:
    runs = [(np.array([0.0, 1.0, 2.0, 4.0]) * k, 5000 * k) for k in (1, 1, 1, 50)]
    times = summarise(runs)
    assert (times.micros.tolist(), times.starts.tolist()) == ([1.0, 2.0], [1.0, 2.0])
    assert (times.waking, times.wall, times.repeats) == (1.0, 5.0, 4)


def test_bench_kernels_takes_a_cpu_model(model: CompiledModel, artifact: Path) -> None:
    timer = CpuKernelTimer(model, artifact)
    rows = timer.time_kernels(2, 1, 20)
    assert sum(r.launches * r.microseconds for r in rows) == pytest.approx(timer.step_us)
    gated = next(r for r in rows if r.node.startswith("linear_gated"))
    assert gated.launches == 3 and gated.flops == 2 * 2 * 64 * 192
    assert rows[-1].kernel == "unattributed"


def test_an_own_step_is_measured_at_its_own_size(artifact: Path, place: Path) -> None:
    mine = collect(artifact, "tiny", Look(step=Step(1, 7, 7), bandwidth=20.0, tflops=0.5))
    report = measure(mine, artifact, place)
    assert report.buckets[0].measured is not None and report.buckets[0].tokens == 7
