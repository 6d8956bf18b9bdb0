"""Attention of a decode step from packed q, k and v, against the ops it replaces."""

from typing import Any

import pytest
import torch
from torch import Tensor

from compilerllm.kernels.reference import fused_ops
from compilerllm.kernels.reference.states import State
from tests.kernels.triton.harness import Guarded, assert_close, cross_compile, device, launch
from tests.kernels.triton.paged import Paged, make_paged
from tests.kernels.triton.test_rope import rand, tables, turn_args

SCALE = 0.21


def pow2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def no_turn() -> dict[str, Any]:
    return {
        "cos": None, "sin": None, "COS_STRIDE": 0, "SIN_STRIDE": 0, "ROT": 0, "INTERLEAVED": False, "HALF_WIDTH": False,
        "ROUND": False,
    }  # fmt: skip


# contexts before the step's token, heads, key heads, D, and what differs from the defaults
CASES: list[tuple[list[int], int, int, int, dict[str, Any]]] = [
    ([0], 2, 2, 16, {"splits": 1}),  # one token
    ([0, 1, 31, 32, 33], 2, 1, 16, {}),
    ([69], 2, 1, 16, {"norm": True}),
    ([31, 0, 130, 32], 4, 2, 16, {"pad": 2, "norm": True, "round_first": True}),
    ([250], 2, 1, 32, {"splits": 5, "style": "interleaved"}),
    ([200, 40], 2, 1, 16, {"splits": 1, "half_width": True}),
    ([200, 40, 70], 2, 1, 16, {"splits": 6, "least": 2, "norm": True, "offset": 1.0}),
    ([150, 7], 7, 1, 24, {"rot": 24}),  # neither group nor head size a power of two
    ([150], 4, 2, 24, {"rot": 8, "norm": True, "only": "k_norm"}),
    ([70], 4, 2, 24, {"rot": 12, "style": "interleaved", "half_width": True, "norm": True, "only": "q_norm"}),
    ([40, 90], 3, 3, 16, {"rot": 0, "tile": 16}),
    ([100, 64, 20], 2, 1, 16, {"window": 40}),
    ([100, 0], 2, 2, 16, {"window": 1, "splits": 2}),
    ([64], 2, 2, 16, {"window": 1}),
    ([90, 3], 4, 2, 16, {"softcap": 5.0, "f32": True}),
    ([90, 0], 4, 2, 16, {"sinks": True}),
    ([170, 33], 4, 1, 16, {"tile": 64, "window": 100, "sinks": True, "softcap": 9.0, "norm": True}),
    ([300], 2, 1, 16, {"tile": 128, "splits": 2}),
    ([60, 100], 6, 1, 16, {"group": 3, "splits": 2}),  # two programs a key head
]


def run(
    paged: Paged, qkv: Tensor, heads: int, kv_heads: int, dim: int, case: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """What the kernel gives, and what the reference does, which fills ``paged.state``."""
    rows, dtype = qkv.shape[0], qkv.dtype
    rot, style, half_width = case.get("rot", dim), case.get("style", "half"), case.get("half_width", False)
    splits, tile, group = case.get("splits", 3), case.get("tile", 32), case.get("group", heads // kv_heads)
    names = ("q_norm", "k_norm")
    norms: dict[str, Tensor | None] = {
        name: rand(dim, seed=i).to(dtype) if case.get("norm") and case.get("only", name) == name else None
        for i, name in enumerate(names)
    }
    sinks = torch.linspace(-1.0, 4.0, heads).to(device()) if case.get("sinks") else None
    options: dict[str, Any] = {
        "eps": 1e-5,
        "offset": case.get("offset", 0.0),
        "round_first": case.get("round_first", False),
    }
    turn = no_turn()
    angles: tuple[Tensor | None, ...] = (None, None)
    if rot:
        text = {torch.float32: "f32", torch.bfloat16: "bf16"}[dtype]
        cos, sin = tables(rows, rot, style, half_width, text)
        rounds = dtype == torch.bfloat16 and not case.get("f32", False)
        turn = turn_args(cos, sin, dim, style, half_width, rounds)
        turn = {n: v for n, v in turn.items() if n not in ("HALF_P", "REST_P")}
        angles = (cos[: paged.tokens].cpu(), sin[: paged.tokens].cpu())
        options |= {"style": style, "half_width": half_width, "f32": case.get("f32", False)}
    out = Guarded((rows, heads, dim), dtype)
    partial = torch.full((rows, heads, splits, dim), float("nan"), device=device())
    stats = torch.full((rows, heads, splits, 2), float("nan"), device=device())
    counters = torch.zeros(rows * heads, dtype=torch.int32, device=device())
    window, softcap = case.get("window", 0), case.get("softcap", 0.0)
    launch("decode:qkv_attention", (heads // group, splits, rows), turn | norms | {
        "cache": paged.cache, "qkv": qkv, "out": out.tensor, "partial": partial, "stats": stats, "counters": counters,
        "sinks": sinks, "seq_lens": paged.fields["seq_lens"], "table": paged.fields["table"], "meta": paged.fields["meta"],
        "X_STRIDE": qkv.shape[1], "OUT_STRIDE": heads * dim, "H": heads, "HK": kv_heads, "G": group, "GP": pow2(group),
        "M": max(16, pow2(group)) if case["dot"] else pow2(group), "D": dim, "DP": pow2(dim),
        "Q_NORM": norms["q_norm"] is not None, "K_NORM": norms["k_norm"] is not None, "EPS": 1e-5,
        "OFFSET": options["offset"], "ROUND_FIRST": options["round_first"], "SCALE": SCALE, "WINDOW": window,
        "SOFTCAP": softcap, "SINKS": sinks is not None, "TILE": tile, "SPLITS": splits, "CHUNK": min(pow2(splits), 4),
        "LEAST": case.get("least", 1), "SINGLE": rows == 1, "DOT": case["dot"],
    })  # fmt: skip
    assert not counters.any(), "counters were not left zero"
    weights = [None if w is None else w.cpu() for w in (*norms.values(), sinks)]
    options |= {"heads": heads, "scale": SCALE, "window": window, "softcap": softcap}
    reference: Any = fused_ops.qkv_attention
    want = reference(paged.state, qkv[: paged.tokens].cpu(), paged.step, *angles, *weights, **options)
    return out.check()[: paged.tokens], want


def check_cache(paged: Paged, state: State) -> None:
    """The new rows are the reference's, all others untouched."""
    held, want = paged.content(), state.data
    assert torch.equal(held.isnan(), want.isnan()), "other rows of the cache were written"
    assert_close(held.nan_to_num(), want.nan_to_num())


@pytest.mark.parametrize(("contexts", "heads", "kv_heads", "dim", "options"), CASES)
@pytest.mark.parametrize(("dtype", "dot"), [("f32", True), ("bf16", True), ("bf16", False)])
def test_qkv_attention(
    contexts: list[int], heads: int, kv_heads: int, dim: int, options: dict[str, Any], dtype: str, dot: bool
) -> None:
    case = options | {"dot": dot}
    pad, window = case.get("pad", 0), case.get("window", 0)
    paged = make_paged(
        [(c, 1) for c in contexts], kv_heads, dim, dtype, window=window, pad_sequences=pad, written=False
    )
    qkv = rand(len(contexts) + pad, (heads + 2 * kv_heads) * dim, dtype=dtype)
    qkv[len(contexts) :] = float("nan")
    out, want = run(paged, qkv, heads, kv_heads, dim, case)
    assert_close(out, want.float())
    check_cache(paged, paged.state)


def arguments(dot: bool, **changes: Any) -> dict[str, Any]:
    """At Qwen3-0.6B's shape."""
    pointers = ("cache", "qkv", "out", "cos", "sin", "q_norm", "k_norm")
    numbers = ("counters", "seq_lens", "table", "meta")
    return dict.fromkeys(pointers, "*bf16") | dict.fromkeys(numbers, "*i32") | {
        "partial": "*fp32", "stats": "*fp32", "sinks": None, "SINKS": False, "X_STRIDE": 4096, "OUT_STRIDE": 2048,
        "COS_STRIDE": 128, "SIN_STRIDE": 128, "H": 16, "HK": 8, "G": 2, "GP": 2, "M": 16 if dot else 2, "D": 128, "DP": 128,
        "ROT": 128, "INTERLEAVED": False, "HALF_WIDTH": True, "ROUND": True, "Q_NORM": True, "K_NORM": True, "EPS": 1e-6,
        "OFFSET": 0.0, "ROUND_FIRST": True, "SCALE": 0.088, "WINDOW": 0, "SOFTCAP": 0.0, "TILE": 64, "SPLITS": 16,
        "CHUNK": 8, "LEAST": 1, "SINGLE": False, "DOT": dot,
    } | changes  # fmt: skip


@pytest.mark.parametrize("capability", [80, 89, 90, 100])
def test_kernels_cross_compile(capability: int) -> None:
    limit = 227 << 10 if capability >= 90 else 99 << 10
    for dot in (True, False):
        meta = cross_compile(
            "decode:qkv_attention", arguments(dot), capability=capability, num_stages=2 if dot else 1,
            pdl=capability >= 90,
        )  # fmt: skip
        assert meta["shared"] <= limit
        assert meta["early"] == ([5, 6] if capability >= 90 else []), (
            "more than the norms is read before the wait"
        )
