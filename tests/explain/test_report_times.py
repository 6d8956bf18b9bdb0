"""Times: a GPU's records shared out among launches, predictions against what they are fitted to."""

import pytest

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
from compilerllm.kernel_times import TimesDoNotMatch
from compilerllm.kernels.triton.target import find_cuda_target
from compilerllm.kernels.tuning import TunedChooser

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
