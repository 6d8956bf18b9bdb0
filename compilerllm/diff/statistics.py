"""How far two sets of measurements are apart, with an interval: a bootstrap over runs and, in each, over its samples."""

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

RESAMPLES = 2000
SHARE = 0.95  # of the resampled differences lies in the interval
SEED = 20250917  # so that the same two files always give the same interval

Runs = Sequence[Sequence[float]]  # one or more runs, each of one or more samples


@dataclass(frozen=True)
class Change:
    """Relative, new against old: 0.05 is 5% more. low, high: of the interval; None where a side has one sample only."""

    old: float
    new: float
    change: float
    low: float | None
    high: float | None
    samples: tuple[int, int]

    @property
    def beyond_noise(self) -> bool:
        """Whether the interval does not hold 0."""
        return self.low is not None and self.high is not None and not self.low <= 0 <= self.high


def compare(old: Runs, new: Runs) -> Change:
    """Medians over all samples, and the interval of their relative difference."""
    counts = sum(map(len, old)), sum(map(len, new))
    before, after = _median(old), _median(new)
    change = _relative(before, after)
    if min(counts) < 2:
        return Change(before, after, change, None, None, counts)
    source = random.Random(SEED)
    drawn = sorted(
        _relative(_median(_resample(old, source)), _median(_resample(new, source))) for _ in range(RESAMPLES)
    )
    edge = int(RESAMPLES * (1 - SHARE) / 2)
    return Change(before, after, change, drawn[edge], drawn[-1 - edge], counts)


def _median(runs: Runs) -> float:
    return statistics.median(value for run in runs for value in run)


def _relative(old: float, new: float) -> float:
    if old == new:
        return 0.0
    return (new - old) / abs(old) if old else float("inf") if new > 0 else float("-inf")


def _resample(runs: Runs, source: random.Random) -> Runs:
    """Runs drawn with replacement, and of each its samples: what differs between runs widens the interval."""
    drawn = source.choices(runs, k=len(runs)) if len(runs) > 1 else runs
    return [source.choices(run, k=len(run)) for run in drawn]
