"""A swap happens only where the model's own code is equal to a formula, rounding included."""

import pytest
import torch
from torch import Tensor, nn

from compilerllm.models import formulas
from compilerllm.models.norms import probe_norm
from compilerllm.models.rotary import probe_rope


class Norm(nn.Module):
    """A root-mean-square norm with one line to get wrong."""

    def __init__(self, spelling: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(32))
        self.spelling, self.eps = spelling, 1e-5

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        match self.spelling:
            case "round first":
                return self.weight * normed.to(x.dtype)
            case "round once":
                return (self.weight * normed).to(x.dtype)
            case "offset":
                return (normed * (1.0 + self.weight.float())).to(x.dtype)
            case "other eps":
                return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-3)).to(
                    x.dtype
                )
            case "mean subtracted":
                return self.weight * (normed - normed.mean(-1, keepdim=True)).to(x.dtype)
        return self.weight * normed.to(x.dtype) * 1.01


@pytest.mark.parametrize(
    ("spelling", "offset", "round_first"),
    [("round first", 0.0, True), ("round once", 0.0, False), ("offset", 1.0, False)],
)
def test_spellings_are_told_apart(spelling: str, offset: float, round_first: bool) -> None:
    form = probe_norm(Norm(spelling))
    assert form is not None and (form.kind, form.eps, form.offset, form.round_first) == (
        "rms",
        1e-5,
        offset,
        round_first,
    )


@pytest.mark.parametrize("spelling", ["other eps", "mean subtracted", "scaled"])
def test_what_no_formula_equals_is_left_alone(spelling: str) -> None:
    assert probe_norm(Norm(spelling)) is None


def test_layer_norm_spelled_out_in_float32() -> None:
    class CohereLikeNorm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.eps = nn.Parameter(torch.ones(32)), 1e-5

        def forward(self, x: Tensor) -> Tensor:
            wide = x.float()
            mean = wide.mean(-1, keepdim=True)
            var = (wide - mean).pow(2).mean(-1, keepdim=True)
            return (self.weight.float() * ((wide - mean) * torch.rsqrt(var + self.eps))).to(x.dtype)

    form = probe_norm(CohereLikeNorm())
    assert form is not None and form.kind == "layer" and not form.round_first


def half(x: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return q * cos + half(q) * sin, k * cos + half(k) * sin


def rotate_wide(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor]:
    turned = rotate(q.float(), k.float(), cos.float(), sin.float(), unsqueeze_dim)
    return turned[0].to(q.dtype), turned[1].to(k.dtype)


def rotate_pairs(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor]:
    return tuple(
        formulas.rope(t, cos, sin, "interleaved", -3 if unsqueeze_dim == 1 else -2, False, False)
        for t in (q, k)
    )  # type: ignore[return-value]


def rotate_back(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor]:
    return rotate(q, k, cos, -sin, unsqueeze_dim)


def test_rotary_spellings_are_told_apart() -> None:
    plain, wide = probe_rope(rotate, {("half", False)}), probe_rope(rotate_wide, {("half", False)})
    pairs = probe_rope(rotate_pairs, {("repeat", False)})
    assert plain is not None and (plain.style, plain.f32, plain.partial) == ("half", False, False)
    assert wide is not None and (wide.style, wide.f32) == ("half", True)
    assert pairs is not None and (pairs.style, pairs.partial) == ("interleaved", True)


def rotate_glm(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor]:
    """Reads half of a table that repeats itself, and turns adjacent columns."""
    cos, sin = (t[..., : t.shape[-1] // 2].repeat_interleave(2, dim=-1) for t in (cos, sin))
    return rotate_pairs(q, k, cos, sin, unsqueeze_dim)


def test_half_of_a_full_table_may_be_read() -> None:
    form = probe_rope(rotate_glm, {("half", False)})
    assert form is not None and (form.style, form.half_width, form.narrow, form.partial) == (
        "interleaved",
        True,
        True,
        True,
    )


def test_a_rotation_the_other_way_is_left_alone() -> None:
    assert probe_rope(rotate_back, {("half", False)}) is None


@pytest.mark.parametrize("layout", ["half", "repeat", "half_width"])
def test_half_width_tables_turn_as_full_ones_do(layout: str) -> None:
    x = torch.randn(1, 2, 5, 16, generator=torch.Generator().manual_seed(0))
    freq = 1.0 / 100.0 ** (torch.arange(0, 16, 2).float() / 16)
    style = "interleaved" if layout == "repeat" else "half"
    full = formulas.rotary_table(
        torch.arange(5)[None], freq, "repeat" if style == "interleaved" else "half", torch.float32, 1.0
    )
    narrow = formulas.rotary_table(torch.arange(5)[None], freq, "half_width", torch.float32, 1.0)
    torch.testing.assert_close(
        formulas.rope(x, *full, style, -3, False, False), formulas.rope(x, *narrow, style, -3, True, False)
    )
