"""Intervals: they hold what is true as often as they say, and they do not change from run to run."""

import random
import statistics

import pytest

from compilerllm.diff.statistics import compare


def test_medians_and_change() -> None:
    found = compare([[1.0, 2.0, 30.0]], [[3.0, 3.0, 3.0]])
    assert (found.old, found.new, found.change) == (2.0, 3.0, 0.5)
    assert found.low is not None and found.high is not None and found.low <= 0.5 <= found.high


def test_one_sample_has_no_interval() -> None:
    found = compare([[4.0]], [[5.0, 5.1]])
    assert found.change == pytest.approx(0.2625) and found.low is None and not found.beyond_noise


def test_same_input_same_interval() -> None:
    data = [[3.97, 3.98, 3.99]], [[4.18, 4.19, 4.2]]
    assert compare(*data) == compare(*data)


def test_clear_change_is_beyond_noise_and_equal_sets_are_not() -> None:
    assert compare([[10.0, 10.1, 9.9, 10.0]], [[11.0, 11.1, 10.9]]).beyond_noise
    assert not compare([[10.0, 10.1, 9.9]], [[10.0, 9.95, 10.05]]).beyond_noise


def test_runs_that_differ_widen_the_interval() -> None:
    """Within a run samples are alike: taken for independent they would say far too much."""
    runs = [[10.0, 10.01, 9.99], [12.0, 12.01, 11.99]]
    by_run = compare(runs, [[11.5, 11.51, 11.49], [11.5, 11.5, 11.5]])
    pooled = compare([[v for run in runs for v in run]], [[11.5, 11.51, 11.49, 11.5, 11.5, 11.5]])
    assert by_run.low is not None and by_run.high is not None
    assert by_run.low < -0.03 and by_run.high > 0.14, "either of the two runs may have been the lucky one"
    assert pooled.high is not None and pooled.high >= by_run.high - 0.01


def test_false_alarms_are_rare() -> None:
    """Of many comparisons of equal things, about one in twenty may be beyond noise; with few samples somewhat more."""
    source = random.Random(1)
    alarms = sum(
        compare(
            [[source.gauss(100, 2) for _ in range(9)]], [[source.gauss(100, 2) for _ in range(9)]]
        ).beyond_noise
        for _ in range(60)
    )
    assert alarms <= 9
    found = sum(
        compare(
            [[source.gauss(100, 1) for _ in range(9)]], [[source.gauss(105, 1) for _ in range(9)]]
        ).beyond_noise
        for _ in range(20)
    )
    assert found == 20, "a change of five deviations is seen every time"


def test_nothing_before() -> None:
    assert compare([[0.0]], [[2.0]]).change == float("inf")
    assert statistics.median([compare([[0.0]], [[0.0]]).change]) == 0
