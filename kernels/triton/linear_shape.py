"""What decides how fast a linear runs, and the constants that models of its time share."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

Candidate = dict[str, Any]
Timed = tuple[float, Candidate]  # seconds by the model
L2_FACTOR = 2.0  # read bandwidth of the L2 over the memory's
LATENCY = 0.8e-6  # seconds from a load to its data
LAUNCH = 0.8e-6  # of a kernel that starts while the one before it ends
NORM_LAUNCH = 1.8e-6  # a norm as a kernel of its own
SM_BYTES = 100e9  # bytes a second that one SM can take in
SM_NORMED = 50e9  # elements a second to which one SM adds, and multiplies by the norm's weight


@dataclass(frozen=True)
class Shape:
    """A linear: M rows at most, N result columns, K; ``halves`` 2 with a gate. item: bytes of an element, out: of a result's."""

    m: int
    n: int
    k: int
    item: int
    out: int
    halves: int
    after: bool  # anything but the product
    bias: bool
    norm: bool
    wide: bool = True  # the dtype has f32's range: a row times the norm's weight fits before it is scaled

    @property
    def weight_bytes(self) -> int:
        return self.halves * self.n * self.k * self.item

    @property
    def flops(self) -> int:
        return 2 * self.m * self.halves * self.n * self.k


def shape_of(problem: Mapping[str, int | str], item: int, out: int) -> Shape:
    """The linear that a problem's fields describe."""
    op = str(problem["op"])
    gated, bias = op.endswith("gated"), bool(problem["bias"])
    return Shape(
        int(problem["M"]), int(problem["N"]), int(problem["K"]), item, out, 2 if gated else 1,
        gated or bias or op.startswith(("linear_act", "linear_add")), bias, op.startswith("norm"),
        problem["dtype"] != "f16",
    )  # fmt: skip


def power_of_two(count: int) -> int:
    """The smallest that is not below ``count``."""
    return 1 << max(0, count - 1).bit_length()


def best(found: Iterable[Timed], most: int | None = None) -> list[Timed]:
    """The cheapest ones, cheapest first; equally cheap ones as they came."""
    return sorted(found, key=lambda f: f[0])[:most]


def together(*seconds: float) -> float:
    """Time of what overlaps, though not wholly."""
    return float(sum(s * s * s for s in seconds) ** (1 / 3))
