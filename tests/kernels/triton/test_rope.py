"""Rotary tables, rotation and writes to the paged cache, against the reference."""

from typing import Any

import pytest
import torch
from torch import Tensor

from compilerllm.kernels.reference import fused_ops, model_ops, serving_ops
from tests.kernels.triton.harness import (
    TORCH,
    Guarded,
    assert_close,
    assert_same,
    cross_compile,
    device,
    launch,
)
from tests.kernels.triton.paged import Paged, make_paged

MIXED = [(0, 5), (40, 1), (31, 3), (0, 1)]
DECODE = [(40, 1), (0, 1), (31, 1)]


def pow2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def rand(*shape: int, dtype: str = "f32", seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(TORCH[dtype]).to(device())


def frequencies(half: int) -> Tensor:
    return (10000.0 ** -(torch.arange(half) / half)).to(device())


@pytest.mark.parametrize("layout", ["half", "repeat", "half_width"])
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize(("tokens", "half"), [(1, 8), (9, 12)])
def test_rotary_table(layout: str, dtype: str, tokens: int, half: int) -> None:
    positions = torch.arange(tokens, dtype=torch.int32, device=device()) * 4099
    width = half if layout == "half_width" else 2 * half
    cos, sin = (Guarded((tokens, width), TORCH[dtype]) for _ in range(2))
    launch("rope:rotary_table", (-(-tokens // 4),), {
        "positions": positions, "inv_freq": frequencies(half), "cos": cos.tensor, "sin": sin.tensor, "COUNT": tokens,
        "SCALING": 1.25, "HALF": half, "WIDTH": width, "WIDTH_P": pow2(width), "REPEAT": layout == "repeat", "BT": 4,
    })  # fmt: skip
    want = model_ops.rotary_table(
        positions.cpu(), frequencies(half).cpu(), layout=layout, dtype=dtype, scaling=1.25
    )
    for out, ref in zip((cos, sin), want, strict=True):
        assert_close(out.check(), ref)


def tables(tokens: int, rot: int, style: str, half_width: bool, dtype: str) -> tuple[Tensor, Tensor]:
    layout = "half_width" if half_width else ("half" if style == "half" else "repeat")
    positions = torch.arange(tokens) * 3
    cos, sin = model_ops.rotary_table(positions, frequencies(rot // 2).cpu(), layout=layout, dtype=dtype)
    return cos.to(device()), sin.to(device())


def turn_args(
    cos: Tensor, sin: Tensor, dim: int, style: str, half_width: bool, rounds: bool
) -> dict[str, Any]:
    rot = cos.shape[-1] * (2 if half_width else 1)
    return {
        "cos": cos, "sin": sin, "COS_STRIDE": cos.shape[-1], "SIN_STRIDE": sin.shape[-1], "ROT": rot,
        "HALF_P": pow2(rot // 2), "REST_P": pow2(dim - rot), "INTERLEAVED": style == "interleaved",
        "HALF_WIDTH": half_width, "ROUND": rounds,
    }  # fmt: skip


TURNS = [("half", False, 16, 16), ("interleaved", False, 16, 16), ("half", True, 16, 16), ("interleaved", True, 24, 24),
         ("half", False, 24, 8), ("interleaved", False, 24, 12), ("half", False, 80, 80)]  # fmt: skip


@pytest.mark.parametrize(("style", "half_width", "dim", "rot"), TURNS)
@pytest.mark.parametrize(("dtype", "f32"), [("f32", False), ("bf16", False), ("bf16", True)])
def test_rope(style: str, half_width: bool, dim: int, rot: int, dtype: str, f32: bool) -> None:
    tokens, heads = 5, 3
    x = rand(tokens, heads, dim, dtype=dtype)
    cos, sin = tables(tokens, rot, style, half_width, dtype)
    out = Guarded((tokens, heads, dim), TORCH[dtype])
    launch("rope:rope", (3, 2), turn_args(cos, sin, dim, style, half_width, dtype == "bf16" and not f32) | {
        "x": x, "out": out.tensor, "COUNT": tokens, "X_STRIDE": heads * dim, "OUT_STRIDE": heads * dim, "HEADS": heads,
        "D": dim, "BT": 2, "BH": 2,
    })  # fmt: skip
    want = model_ops.rope(
        x.cpu(), cos.cpu(), sin.cpu(), style=style, head_axis=-2, half_width=half_width, f32=f32
    )
    if dtype == "bf16" and not f32:
        assert_same(out.check(), want)  # the roundings are the reference's
    else:
        assert_close(out.check(), want)


def step_fields(paged: Paged) -> dict[str, Tensor]:
    return {name: paged.fields[name] for name in ("positions", "query_start", "table", "meta")}


def same_cache(paged: Paged, exact: bool) -> None:
    """The cache holds what the reference wrote to its state, NaN for NaN."""
    out, want = paged.content(), paged.state.data
    assert torch.equal(out.isnan(), want.isnan()), "other rows of the cache were written"
    if exact:
        assert_same(out.nan_to_num(), want.nan_to_num())
    else:
        assert_close(out.nan_to_num(), want.nan_to_num())


def steps_of(paged: Paged, decode: bool) -> int:
    return -1 if decode else (len(paged.fields["seq_lens"]) - 1).bit_length()


@pytest.mark.parametrize("lengths", [MIXED, DECODE, [(0, 7)], [(64, 1)]])
@pytest.mark.parametrize(("heads", "dim"), [(2, 16), (3, 24)])
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_kv_write(lengths: list[tuple[int, int]], heads: int, dim: int, dtype: str) -> None:
    pad = 3
    paged = make_paged(lengths, heads, dim, dtype, pad_sequences=pad, pad_tokens=pad, written=False)
    k, v = (
        rand(paged.tokens + pad, heads, dim + 8, dtype=dtype),
        rand(paged.tokens + pad, heads * dim, dtype=dtype, seed=1),
    )
    k = k[:, :, :dim].reshape(len(k), -1)
    launch("rope:kv_write", (-(-len(k) // 2), 2), step_fields(paged) | {
        "cache": paged.cache, "k": k, "v": v, "COUNT": len(k), "K_STRIDE": heads * dim, "V_STRIDE": heads * dim,
        "HK": heads, "D": dim, "DP": pow2(dim), "STEPS": steps_of(paged, lengths is DECODE), "BT": 2, "BH": 2,
    })  # fmt: skip
    rows = slice(0, paged.tokens)
    serving_ops.kv_write(
        paged.state, k[rows].cpu().view(-1, heads, dim), v[rows].cpu().view(-1, heads, dim), paged.step
    )
    same_cache(paged, True)


CASES: list[dict[str, Any]] = [
    {},
    {"style": "interleaved"},
    {"half_width": True, "f32": True},
    {"norm": True},
    {"norm": True, "round_first": True},
    {"norm": True, "round_first": True, "offset": 1.0, "style": "interleaved"},
    {"norm": True, "offset": 1.0, "dim": 24, "rot": 8},
    {"dim": 24, "rot": 24},
    {"rot": 0},
    {"rot": 0, "norm": True},
    {"norm": True, "only": "k_norm"},
    {"heads": 7, "kv_heads": 1},
]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("lengths", [MIXED, DECODE])
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_qkv_rope_write(case: dict[str, Any], lengths: list[tuple[int, int]], dtype: str) -> None:
    heads, kv_heads, dim = case.get("heads", 4), case.get("kv_heads", 2), case.get("dim", 16)
    style, half_width, f32 = case.get("style", "half"), case.get("half_width", False), case.get("f32", False)
    rot, pad, total = case.get("rot", dim), 2, heads + 2 * kv_heads
    paged = make_paged(lengths, kv_heads, dim, dtype, pad_sequences=pad, pad_tokens=pad, written=False)
    tokens = paged.tokens + pad
    qkv = rand(tokens, total * dim, dtype=dtype)
    out = Guarded((tokens, heads, dim), TORCH[dtype])
    norms: dict[str, Tensor | None] = {}
    for seed, name in enumerate(("q_norm", "k_norm")):
        wanted = case.get("norm", False) and case.get("only", name) == name
        norms[name] = rand(dim, dtype=dtype, seed=seed + 7) if wanted else None
    options = {"eps": 1e-5, "offset": case.get("offset", 0.0), "round_first": case.get("round_first", False)}
    if rot:
        cos, sin = tables(tokens, rot, style, half_width, dtype)
        turn = turn_args(cos, sin, dim, style, half_width, dtype == "bf16" and not f32)
        angles: tuple[Tensor, ...] = (cos[: paged.tokens].cpu(), sin[: paged.tokens].cpu())
        options |= {"style": style, "half_width": half_width, "f32": f32}
    else:
        turn = {
            "cos": None, "sin": None, "COS_STRIDE": 0, "SIN_STRIDE": 0, "ROT": 0, "HALF_P": 1, "REST_P": pow2(dim),
            "INTERLEAVED": False, "HALF_WIDTH": False, "ROUND": False,
        }  # fmt: skip
        angles = ()
    launch("rope:qkv_rope_write", (-(-tokens // 2), -(-total // 4)), turn | step_fields(paged) | norms | {
        "cache": paged.cache, "qkv": qkv, "out": out.tensor, "COUNT": tokens, "X_STRIDE": total * dim,
        "OUT_STRIDE": heads * dim, "H": heads, "HK": kv_heads, "D": dim, "Q_NORM": norms["q_norm"] is not None,
        "K_NORM": norms["k_norm"] is not None, "EPS": 1e-5, "OFFSET": options["offset"],
        "ROUND_FIRST": options["round_first"], "STEPS": steps_of(paged, lengths is DECODE), "BT": 2, "BH": 4,
    })  # fmt: skip
    weights = [None if w is None else w.cpu() for w in norms.values()]
    given = (*angles, *weights) if angles else (None, None, *weights)
    want = fused_ops.qkv_rope_write(
        paged.state, qkv[: paged.tokens].cpu(), paged.step, *given, heads=heads, **options
    )
    exact = dtype == "bf16" and not case.get("norm") and not f32
    if exact:
        assert_same(out.check()[: paged.tokens], want)
    else:
        assert_close(out.check()[: paged.tokens], want)
    same_cache(paged, exact)


@pytest.mark.parametrize("capability", [80, 89, 90, 100])
def test_kernels_cross_compile(capability: int) -> None:
    """At Qwen3-0.6B's shape, with norms."""
    names = ("cache", "qkv", "out", "cos", "sin", "q_norm", "k_norm")
    numbers = ("positions", "query_start", "table", "meta")
    args: dict[str, Any] = dict.fromkeys(names, "*bf16") | dict.fromkeys(numbers, "*i32") | {
        "COUNT": "i32", "X_STRIDE": 4096, "OUT_STRIDE": 2048, "COS_STRIDE": 128, "SIN_STRIDE": 128, "H": 16, "HK": 8,
        "D": 128, "ROT": 128, "HALF_P": 64, "REST_P": 1, "INTERLEAVED": False, "HALF_WIDTH": False, "ROUND": True,
        "Q_NORM": True, "K_NORM": True, "EPS": 1e-6, "OFFSET": 0.0, "ROUND_FIRST": True, "BT": 2, "BH": 16,
    }  # fmt: skip
    for pdl in (False, True) if capability >= 90 else (False,):
        for steps in (-1, 8):
            cross_compile("rope:qkv_rope_write", args | {"STEPS": steps}, capability=capability, pdl=pdl)
    table = {
        "positions": "*i32", "inv_freq": "*fp32", "cos": "*bf16", "sin": "*bf16", "COUNT": "i32", "SCALING": 1.0,
        "HALF": 64, "WIDTH": 128, "WIDTH_P": 128, "REPEAT": False, "BT": 4,
    }  # fmt: skip
    cross_compile("rope:rotary_table", table, capability=capability)
