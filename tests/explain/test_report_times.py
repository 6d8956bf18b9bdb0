"""Times: a GPU's records shared out among launches, predictions against what they are fitted to."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._C._autograd import DeviceType

from compilerllm.compiled_cuda import CudaModel
from compilerllm.cuda_program import CudaOptions
from compilerllm.explain import gpu_times
from compilerllm.explain.gpu_times import Record, attribute
from compilerllm.explain.predict import (
    Predictor,
    Sample,
    Speed,
    Work,
    fit,
    hold_out,
    samples,
    summarise_errors,
    work_of,
)
from compilerllm.ir.step import Bucket
from compilerllm.kernel_times import TimesDoNotMatch, made_up_step
from compilerllm.kernels.triton.target import find_cuda_target
from compilerllm.kernels.tuning import TunedChooser
from tests.kernels.gpu.greedy import GreedySampler
from tests.kernels.gpu.tiny import IdentitySource, write_artifact

TARGET = find_cuda_target("sm_90")


def steps(count: int, *one: tuple[str, float, float], period: float) -> list[Record]:
    """The same records again and again, ``period`` apart."""
    return [Record(n, start + i * period, us) for i in range(count) for n, start, us in one]


def test_kernels_copies_and_idle_time_add_up_to_the_step() -> None:
    records = steps(
        4, ("a", 0, 10), ("b", 8, 12), ("gemm", 21, 5), ("reduce", 26, 2), ("a", 30, 10), ("Memcpy HtoD", 42, 3), period=50
    )  # fmt: skip
    times = attribute(records, ["a", "b", "", "a"])
    # b begins while a runs and has what is left of it after a; cuBLAS' two kernels are one launch.
    assert times.micros.tolist() == [10, 10, 7, 10]
    assert times.starts.tolist() == pytest.approx([0, 8, 23.5, 30])
    assert (times.step, times.copies, times.repeats) == (50, 3, 3)
    assert times.idle == pytest.approx(1 + 2 + 2 + 5)  # before gemm, the second a, the copy, the next step
    assert times.micros.sum() + times.copies + times.idle == pytest.approx(times.step)


def test_a_kernel_within_another_has_no_time_of_its_own() -> None:
    times = attribute(steps(3, ("a", 0, 10), ("b", 2, 3), ("c", 9, 4), period=20), ["a", "b", "c"])
    assert times.micros.tolist() == [10, 0, 3]
    assert times.idle == 7


def test_records_out_of_order_and_of_the_last_step_do_not_disturb() -> None:
    records = steps(3, ("a", 0, 4), ("b", 5, 4), period=10)
    records[-1] = Record("b", 25, 400)  # the last step is left out: nobody sees its end
    times = attribute(records[::-1], ["a", "b"])
    assert (times.micros.tolist(), times.step, times.idle) == ([4, 4], 10, 2)


@pytest.mark.parametrize("names", [["a", "x"], ["a"], ["b", "a"]])
def test_records_of_other_launches_are_refused(names: list[str]) -> None:
    with pytest.raises(TimesDoNotMatch):
        attribute(steps(3, ("a", 0, 4), ("b", 5, 4), period=10), names)


def test_one_step_has_no_period() -> None:
    with pytest.raises(TimesDoNotMatch, match="fewer than two"):
        attribute(steps(1, ("a", 0, 4), period=10), ["a"])


def test_a_fit_finds_the_speed_that_made_the_times() -> None:
    true = Speed(3.0, 0.8, 0.7, 1.2)
    work = [Work(1e6 * m, 1e9 * f, k) for m in (1, 20, 300) for f in (0.1, 30, 900) for k in (512, 4096)]
    times = true.time(work, 4000, 750)
    made = [
        Sample("linear", f"K={i}", w, float(us)) for i, (w, us) in enumerate(zip(work, times, strict=True))
    ]
    found = fit(made, 4000, 750)
    assert found.time(work, 4000, 750) == pytest.approx(times, rel=0.05)


def test_predictions_hold_for_widths_that_were_not_seen() -> None:
    """The aim for kernels in a step is a median of 25%; alone, and held out, they must do better."""
    data = TunedChooser.for_target(TARGET).data
    assert data is not None
    found = samples(data)
    assert len(found) > 100
    predictor = Predictor.of(TARGET, data)
    fitted = summarise_errors((s.family, predictor.time(s.family, s.work), s.us) for s in found)
    held = summarise_errors(
        hold_out([s for s in found if s.family != "linear"], TARGET.bandwidth, TARGET.tflops)
    )
    assert {e.family: e.median for e in fitted}["all"] < 0.10
    assert {e.family: e.median for e in held}["all"] < 0.15


def test_the_work_of_a_problem_is_counted_by_hand() -> None:
    linear = work_of(
        "linear", {"M": "8", "N": "32", "K": "16", "op": "linear_gated", "out": "bf16", "dtype": "bf16"}
    )
    # 64 rows of weights of 16, 8 rows in, 8 rows of 32 out, 2 bytes each; a product and a sum an element.
    assert linear == Work((64 * 16 + 8 * 16 + 8 * 32) * 2, 2 * 8 * 64 * 16, 16)
    experts = work_of("experts", {"M": "1", "E": "8", "k": "2", "H": "4", "F": "3", "dtype": "bf16"})
    assert experts is not None and experts.nbytes == pytest.approx((2 * 3 * 4 * 3 + 2 * 4) * 2)
    assert work_of("unheard of", {}) is None


def test_errors_are_medians_by_family_and_over_all() -> None:
    pairs = [("a", 11.0, 10.0), ("a", 12.0, 10.0), ("a", 10.0, 10.0), ("b", 5.0, 10.0), ("b", 1.0, 0.0)]
    a, b, everything = summarise_errors(pairs)
    assert (a.family, a.count) == ("a", 3) and a.median == pytest.approx(0.1)
    assert (b.count, b.median) == (1, 0.5)  # what took no time has no error
    assert everything.family == "all" and everything.median == pytest.approx(0.15)


class _Profiler:
    """In place of torch's: tells of every step that was run the same kernels, 2 us each, a step 10 us apart."""

    def __init__(self, names: list[str]) -> None:
        self.names = names

    def __enter__(self) -> "_Profiler":
        return self

    def __exit__(self, *_: object) -> None: ...

    def events(self) -> list[SimpleNamespace]:
        return [
            SimpleNamespace(
                name=name, device_type=DeviceType.CUDA, device_time_total=2.0,
                time_range=SimpleNamespace(start=10.0 * step + 2.5 * i),
            )
            for step in range(gpu_times.REPEATS)
            for i, name in enumerate(self.names)
        ]  # fmt: skip


def test_a_model_is_run_one_step_ahead_and_its_launches_get_the_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = pytest.importorskip("compilerllm.kernels.triton.interpreted_backend")
    write_artifact(tmp_path, (Bucket(2, 2, 2, 1),))
    model = CudaModel.load(
        tmp_path, IdentitySource(), backend=backend.InterpretedBackend(), options=CudaOptions(), sampler=GreedySampler
    )  # fmt: skip
    model.allocate(8, 2)
    step = made_up_step(model, 2, 1, 3)
    launches, kernels = model.launches_of(step)
    names = [kernels[x.kernel].name for x in launches]
    monkeypatch.setattr(torch.profiler, "profile", lambda activities: _Profiler(names))
    ran: list[str] = []
    enqueue = CudaModel.enqueue

    def watched(self: CudaModel, *args: Any) -> Any:
        ran.append("enqueue")
        pending = enqueue(self, *args)

        def result() -> Any:
            ran.append("result")
            return pending.result()

        return SimpleNamespace(result=result)

    monkeypatch.setattr(CudaModel, "enqueue", watched)
    monkeypatch.setattr(gpu_times, "REPEATS", 3)
    monkeypatch.setattr(gpu_times, "WARM_UP", 1)
    times = gpu_times.time_step(model, step)
    assert ran == ["enqueue", "result", "enqueue", "enqueue", "result", "enqueue", "result", "result"]
    assert times.micros.tolist() == [2.0] * len(launches) and times.step == 10.0
    assert times.idle == pytest.approx(10.0 - 2.0 * len(launches))
