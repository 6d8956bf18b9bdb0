"""How far a result may stray: measured against float32, by what the reference itself loses in the same dtype.

An optimized model rounds where the reference rounds, in another order of summing. So it may err as much as the
reference in the same dtype does, times ``ALLOWED``, and a floor for what differs in float32 already, where the
reference's own error is zero.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

ALLOWED = 1.25  # times the reference's own error, over all logits
ALLOWED_STEP = 2.0  # over the logits of one step: a decode has two rows, so the quotient is noisier
ALLOWED_ROW = 4.0  # of one row, times the reference's worst row
FLOOR = 2.0**-15  # of the root mean square of the exact result: sums in f32 in another order
# One node alone, on the inputs that it had. A kernel may round a product of its own (attention's weights to bf16),
# where the reference keeps f32, so that its error is a few roundings where the reference has one.
ALLOWED_NODE = 2.0
FLOOR_NODE = {"bf16": 2.0**-10, "f16": 2.0**-13, "f32": 2.0**-16}
# A routing decision may fall the other way where two experts are nearly alike: so many of the choices at most.
ALLOWED_CHOICES = 0.02


@dataclass(frozen=True)
class Measure:
    """Errors against float32, root mean squares: ``ours``, the reference's ``own``, and what is ``allowed``."""

    ours: float
    own: float
    allowed: float

    @property
    def within(self) -> bool:
        return self.ours <= self.allowed

    @property
    def ratio(self) -> float:
        """Ours by what is allowed: above 1 is outside."""
        return self.ours / self.allowed if self.allowed else (0.0 if self.ours == 0 else float("inf"))


def rms(values: Tensor) -> float:
    """Root mean square; infinite where a value is not finite."""
    if not values.numel():
        return 0.0
    wide = values.double()
    return float(wide.square().mean().sqrt()) if bool(wide.isfinite().all()) else float("inf")


def _centred(logits: Tensor) -> Tensor:
    """Logits with each row's mean taken out: softmax does not see it."""
    return logits.double() - logits.double().mean(-1, keepdim=True)


def measure_logits(ours: Tensor, own: Tensor, exact: Tensor, factor: float = ALLOWED) -> Measure:
    """Logits [N, V] of the same rows."""
    want = _centred(exact)
    allowed = factor * rms(_centred(own) - want) + FLOOR * rms(want)
    return Measure(rms(_centred(ours) - want), rms(_centred(own) - want), allowed)


@dataclass(frozen=True)
class Whole:
    """A model's logits against the reference's: all of them, step by step, and the worst row."""

    all: Measure
    steps: tuple[Measure, ...]
    worst_row: Measure
    agree: float  # share of rows whose likeliest token is float32's

    @property
    def within(self) -> bool:
        return self.all.within and self.worst_row.within and all(s.within for s in self.steps)


def measure_whole(ours: Sequence[Tensor], own: Sequence[Tensor], exact: Sequence[Tensor]) -> Whole:
    """Logits of every step, in order: [rows, V] each."""
    a, b, c = torch.cat(list(ours)), torch.cat(list(own)), torch.cat(list(exact))
    want = _centred(c)
    mine, theirs = ((_centred(x) - want).square().mean(-1).sqrt() for x in (a, b))
    worst = float(mine.nan_to_num(nan=float("inf")).max())
    limit = ALLOWED_ROW * float(theirs.max()) + FLOOR * rms(want)
    return Whole(
        measure_logits(a, b, c),
        tuple(measure_logits(*step, ALLOWED_STEP) for step in zip(ours, own, exact, strict=True)),
        Measure(worst, float(theirs.max()), limit),
        float((a.argmax(-1) == c.argmax(-1)).double().mean()),
    )


def measure_value(ours: Tensor, own: Tensor, exact: Tensor, dtype: str) -> Measure:
    """One node's result beside the reference's on the same inputs, and float32's."""
    if not exact.is_floating_point():
        wrong = float((ours != own).double().mean()) if own.numel() else 0.0
        near = float((own != exact).double().mean()) if own.numel() else 0.0
        return Measure(wrong, near, ALLOWED_NODE * near + ALLOWED_CHOICES)
    error, theirs = rms(ours.float() - exact), rms(own.float() - exact)
    return Measure(error, theirs, ALLOWED_NODE * theirs + FLOOR_NODE.get(dtype, 2.0**-16) * rms(exact))
