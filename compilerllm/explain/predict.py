"""How long a kernel will take: a model between the roofline and reality, fitted to what was timed on the chip.

Every family of kernels has four numbers: a floor (launch, first load, last store), the shares of the memory's and of the
matrix units' speed that it reaches, and the time of one step along K, which no parallelism hides. They are fitted each
time from the tuning data for the chip, so that new figures make new predictions; a family with no data takes those of the
small memory-bound kernels. What was timed itself is predicted as it was timed.
"""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from compilerllm.kernels.triton.target import TARGETS, CudaTarget
from compilerllm.kernels.tuning import CONTEXT, TunedChooser, TuningData, tuning_files

FEWEST = 2  # problems that a family must have for numbers of its own
SHARP = 3.0  # how sharply the slowest of memory, matrix units and K decides: 1 adds them, infinity takes the largest
# What few problems of one size alone would say of floor and memory is not to be believed beyond these.
FLOORS_US, LEAST_MEMORY = (0.8, 6.0), 0.25
VECTOR_ROWS = 4  # up to so many rows a linear is a product with vectors
Array = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True)
class Work:
    """What a node must do. depth: K of a matrix product, 0 elsewhere."""

    nbytes: float
    flops: float
    depth: float = 0.0


@dataclass(frozen=True)
class Speed:
    """Of one family: floor in microseconds, shares of memory's and matrix units' speed, nanoseconds a step along K."""

    floor_us: float
    memory: float
    compute: float
    step_ns: float

    def time(self, work: Sequence[Work], bandwidth: float, tflops: float) -> Array:
        """Microseconds of each piece of work, on a chip of so many GB/s and TFLOP/s."""
        table = np.array([(w.nbytes, w.flops, w.depth) for w in work], float).reshape(-1, 3)
        parts = table * (
            1e-3 / (bandwidth * self.memory),
            1e-6 / (tflops * self.compute) if tflops else 0.0,
            1e-3 * self.step_ns,
        )
        return np.asarray(self.floor_us + (parts**SHARP).sum(axis=1) ** (1 / SHARP))


# Where nothing was timed: typical of kernels that move little.
UNKNOWN = Speed(1.5, 0.6, 0.6, 1.0)
# Whose numbers a family takes that has none of its own; all others take those of qkv_rope_write, which moves little too.
KIN = {"norm_route": "linear, few rows", "linear, few rows": "linear", "attention": "prefill_attention"}


@dataclass(frozen=True)
class Sample:
    """A problem that was timed, with the time of its fastest candidate."""

    family: str
    problem: str
    work: Work
    us: float


def family_of(family: str, rows: float) -> str:
    """The family that a linear belongs to for its speed: products with few rows are bound by other things."""
    if family != "linear":
        return family
    return "linear, few rows" if rows <= VECTOR_ROWS else "linear"


def work_of(family: str, fields: Mapping[str, str]) -> Work | None:
    """What a problem of the tuning data must do, by its fields; None for a family that is not known here.

    Attention was timed with ``CONTEXT`` tokens a sequence, prefill with one sequence of all tokens.
    """
    item = 4 if fields.get("dtype") == "f32" else 2

    def n(name: str) -> int:
        return int(fields[name])

    match family:
        case "linear":
            m, k, op = n("M"), n("K"), fields["op"]
            columns = n("N") * (2 if op.endswith("gated") else 1)
            out = 4 if fields["out"] == "f32" else 2
            extra = 2 * m * k * item if op.startswith("norm") else 0
            moved = (columns * k + m * k) * item + m * n("N") * out + extra
            return Work(moved, 2.0 * m * columns * k, k)
        case "experts":
            m, e, h, f, top = n("M"), n("E"), n("H"), n("F"), n("k")
            hit = e * (1 - (1 - top / e) ** m)
            return Work((hit * 3 * h * f + 2 * m * h) * item, 6.0 * m * top * h * f, 0)
        case "norm_route":
            m, k = n("M"), n("K")
            return Work((n("N") * k + 4 * m * k) * item, 2.0 * m * n("N") * k, k)
        case "decode_attention" | "decode_qkv":
            s, heads, kv, dim = n("S" if "S" in fields else "M"), n("H"), n("HK"), n("D")
            moved = (2 * kv * CONTEXT + 2 * heads + 2 * kv) * dim * item * s
            return Work(moved, 4.0 * s * CONTEXT * heads * dim)
        case "prefill_attention":
            t, heads, kv, dim = n("T"), n("H"), n("HK"), n("D")
            return Work((2 * kv + 2 * heads) * dim * item * t, 2.0 * t * t * heads * dim)
        case "qkv_rope_write":
            width = (n("H") + 2 * n("HK")) * n("D")
            return Work(2 * width * item * n("T"), 8.0 * width * n("T"))
    return None


def samples(data: TuningData) -> list[Sample]:
    """Every problem whose work is known, under the family its speed belongs to."""
    found = []
    for family, problems in data.entries.items():
        for key, timed in problems.items():
            fields = dict(part.split("=", 1) for part in key.split(","))
            work = work_of(family, fields)
            if work is not None and timed:
                rows = float(fields.get("M", 0))
                found.append(Sample(family_of(family, rows), key, work, float(timed[0]["us"])))
    return found


def fit(found: Sequence[Sample], bandwidth: float, tflops: float) -> Speed:
    """The numbers that make the mean error of the times' logarithms least, by search along one number at a time."""
    times = np.log([s.us for s in found])
    work = [s.work for s in found]

    def error(numbers: Sequence[float]) -> float:
        return float(np.abs(np.log(Speed(*numbers).time(work, bandwidth, tflops)) - times).mean())

    best = [max(FLOORS_US[0], min(2.0, 0.7 * min(s.us for s in found))), 0.8, 0.8, 1.0]
    least = error(best)
    for factor in (2.0, 1.4, 1.2, 1.1, 1.04, 1.01):
        improved = True
        while improved:
            improved = False
            for index in range(len(best)):
                for step in (factor, 1 / factor):
                    tried = [*best]
                    tried[index] *= step
                    allowed = (
                        FLOORS_US[0] <= tried[0] <= FLOORS_US[1]
                        and tried[1] >= LEAST_MEMORY
                        and max(tried[1:3]) <= 1.5
                    )
                    if allowed and (found_error := error(tried)) < least - 1e-9:
                        best, least, improved = tried, found_error, True
    return Speed(*best)


@dataclass(frozen=True)
class Predictor:
    """Predicted times on one chip."""

    bandwidth: float
    tflops: float
    speeds: Mapping[str, Speed]

    @staticmethod
    def of(target: CudaTarget, data: TuningData | None) -> "Predictor":
        """Fitted to the data, where there is any."""
        found = samples(data) if data is not None else []
        families = sorted({s.family for s in found})
        groups = {f: [s for s in found if s.family == f] for f in families}
        speeds = {
            f: fit(group, target.bandwidth, target.tflops)
            for f, group in groups.items()
            if len(group) >= FEWEST
        }
        return Predictor(target.bandwidth, target.tflops, speeds)

    def speed(self, family: str) -> Speed:
        """A family's numbers, or those of its kin."""
        kin = KIN.get(family, "qkv_rope_write")
        return self.speeds.get(family) or self.speeds.get(kin) or UNKNOWN

    def time(self, family: str, work: Work) -> float:
        """Microseconds."""
        return float(self.speed(family).time([work], self.bandwidth, self.tflops)[0])


@cache
def predictor_for(target: CudaTarget, own: Path | None = None) -> Predictor:
    """Fitted to what comes with the package and lies in the folder ``own``, once in a process. A chip that nothing was
    timed on takes the shares that another one's kernels reach."""
    data = TunedChooser.for_target(target, own).data
    if data is None:
        other = next(t for t in TARGETS if tuning_files(t))
        fitted = Predictor.of(other, TunedChooser.for_target(other).data)
        return Predictor(target.bandwidth, target.tflops, fitted.speeds)
    return Predictor.of(target, data)


@dataclass(frozen=True)
class Error:
    """Of predictions of one family: how many, the median of |predicted - measured| / measured, and the worst tenth's."""

    family: str
    count: int
    median: float
    worst: float


def summarise_errors(pairs: Iterable[tuple[str, float, float]]) -> list[Error]:
    """Of (family, predicted, measured), by family, and of all ("all", last)."""
    table: dict[str, list[float]] = {}
    for family, predicted, measured in pairs:
        if measured > 0:
            share = abs(predicted - measured) / measured
            table.setdefault(family, []).append(share)
    everything = [e for errors in table.values() for e in errors]
    rows = [*sorted(table.items()), *([("all", everything)] if everything else [])]
    return [
        Error(f, len(e), statistics.median(e), sorted(e)[max(0, math.ceil(0.9 * len(e)) - 1)])
        for f, e in rows
    ]


def hold_out(found: Sequence[Sample], bandwidth: float, tflops: float) -> list[tuple[str, float, float]]:
    """(family, predicted, measured) of every sample, each predicted from the samples of other widths of its family."""
    pairs = []
    for held in found:
        rest = [s for s in found if s.family == held.family and _width(s) != _width(held)]
        if len(rest) < FEWEST:
            continue
        speed = fit(rest, bandwidth, tflops)
        pairs.append((held.family, float(speed.time([held.work], bandwidth, tflops)[0]), held.us))
    return pairs


def _width(sample: Sample) -> tuple[str, ...]:
    """A problem without its number of tokens: equal for the sizes of one layer of one model."""
    parts = sample.problem.split(",")
    return tuple(p for p in parts if p.split("=")[0] in ("K", "N", "H", "HK", "E", "F", "D"))
