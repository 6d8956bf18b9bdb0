"""Attention over the paged cache and over dense keys, against the reference in f32."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from compilerllm.kernels.reference.model_ops import attention
from compilerllm.kernels.reference.serving_ops import paged_attention
from tests.kernels.triton.harness import (
    TORCH,
    Guarded,
    assert_close,
    assert_same,
    cross_compile,
    device,
    launch,
)
from tests.kernels.triton.paged import Paged, make_paged, widened

SCALE = 0.21


def pow2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def query(rows: int, heads: int, dim: int, dtype: str) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    q = torch.randn(rows, heads, dim, generator=generator) * 2
    return q.to(TORCH[dtype]).to(device())


def sink_values(heads: int, wanted: bool) -> Tensor | None:
    return torch.linspace(-1.0, 4.0, heads).to(device()) if wanted else None


def expected(paged: Paged, q: Tensor, sinks: Tensor | None, window: int, softcap: float) -> Tensor:
    wide = q[: paged.tokens].cpu().float()
    cap: dict[str, Any] = {"scale": SCALE, "window": window, "softcap": softcap}
    return paged_attention(wide, widened(paged), paged.step, None if sinks is None else sinks.cpu(), **cap)


def run_decode(
    paged: Paged, q: Tensor, kv_heads: int, *, splits: int = 3, tile: int = 32, least: int = 1, fused: bool = True, window: int = 0,
    softcap: float = 0.0, sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    rows, heads, dim = q.shape
    out = Guarded((rows, heads, dim), q.dtype)
    group = heads // kv_heads
    partial = torch.full((rows, heads, splits, dim), float("nan"), device=device())
    stats = torch.full((rows, heads, splits, 2), float("nan"), device=device())
    counters = torch.zeros(rows * kv_heads, dtype=torch.int32, device=device())
    shared = {
        "out": out.tensor, "partial": partial, "stats": stats, "sinks": sinks, "SINKS": sinks is not None,
        "seq_lens": paged.fields["seq_lens"], "OUT_STRIDE": heads * dim, "H": heads, "D": dim, "DP": pow2(dim),
        "TILE": tile, "SPLITS": splits, "CHUNK": min(pow2(splits), 4), "LEAST": least,
        "WINDOW": window,
    }  # fmt: skip
    launch("attention:decode", (kv_heads, splits, rows), shared | {
        "q": q, "cache": paged.cache, "counters": counters, "table": paged.fields["table"], "meta": paged.fields["meta"],
        "Q_STRIDE": heads * dim, "HK": kv_heads, "G": group, "GP": pow2(group), "M": max(16, pow2(group)), "SCALE": SCALE,
        "SOFTCAP": softcap, "FUSED": fused,
    })  # fmt: skip
    assert not counters.any(), "counters were not left zero"
    if not fused:
        launch("attention:decode_reduce", (heads, rows), shared)
    paged.content()
    return out.check()[: paged.tokens]


def run_prefill(
    paged: Paged, q: Tensor, kv_heads: int, *, rows: int = 16, tile: int = 32, window: int = 0, softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    tokens, heads, dim = q.shape
    out = Guarded((tokens, heads, dim), q.dtype)
    group = heads // kv_heads
    queries = rows // group
    sequences = len(paged.fields["seq_lens"])
    launch("attention:prefill", (kv_heads, -(-tokens // queries) + sequences), {
        "q": q, "cache": paged.cache, "out": out.tensor, "sinks": sinks, "SINKS": sinks is not None,
        "query_start": paged.fields["query_start"], "seq_lens": paged.fields["seq_lens"], "table": paged.fields["table"],
        "meta": paged.fields["meta"], "Q_STRIDE": heads * dim, "OUT_STRIDE": heads * dim, "H": heads, "HK": kv_heads,
        "G": group, "BQ": queries, "BM": rows, "BN": tile, "D": dim, "DP": pow2(dim), "SCALE": SCALE, "WINDOW": window,
        "SOFTCAP": softcap, "STEPS": (sequences - 1).bit_length(),
    })  # fmt: skip
    paged.content()
    return out.check()[: paged.tokens]


DECODES: list[tuple[list[int], int, int, int, dict[str, Any]]] = [
    ([0], 2, 2, 16, {}),  # one token
    ([69], 2, 1, 16, {}),
    ([31, 0, 130, 32], 4, 2, 16, {"pad": 2}),
    ([200], 2, 1, 32, {"splits": 8}),
    ([200, 40], 2, 1, 16, {"splits": 1}),
    ([200, 40, 70], 2, 1, 16, {"splits": 6, "least": 2}),
    ([150, 7], 7, 1, 24, {}),  # neither group nor head size a power of two
    ([100, 64, 20], 2, 1, 16, {"window": 40}),
    ([100], 2, 2, 16, {"window": 1}),
    ([90, 3], 4, 2, 16, {"softcap": 5.0}),
    ([90, 3], 4, 2, 16, {"sinks": True}),
    ([170, 33], 4, 1, 16, {"tile": 64, "window": 100, "sinks": True, "softcap": 9.0}),
    ([300], 2, 1, 16, {"tile": 128, "splits": 2}),
]


@pytest.mark.parametrize(("contexts", "heads", "kv_heads", "dim", "options"), DECODES)
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("fused", [True, False])
def test_decode(
    contexts: list[int], heads: int, kv_heads: int, dim: int, options: dict[str, Any], dtype: str, fused: bool
) -> None:
    more = dict(options)
    pad, sinks = more.pop("pad", 0), sink_values(heads, more.pop("sinks", False))
    window, softcap = more.get("window", 0), more.get("softcap", 0.0)
    paged = make_paged([(c, 1) for c in contexts], kv_heads, dim, dtype, window=window, pad_sequences=pad)
    q = query(len(contexts) + pad, heads, dim, dtype)
    out = run_decode(paged, q, kv_heads, sinks=sinks, fused=fused, **more)
    assert_close(out, expected(paged, q, sinks, window, softcap))


def test_decode_leaves_padded_rows_alone() -> None:
    paged = make_paged([(5, 1)], 1, 16, pad_sequences=2)
    q = query(3, 1, 16, "bf16")
    q[1:] = float("nan")
    out = run_decode(paged, q, 1)
    assert_close(out, expected(paged, q, None, 0, 0.0))


def test_splits_give_the_same_as_one() -> None:
    paged = make_paged([(250, 1)], 1, 16, "f32")
    q = query(1, 2, 16, "f32")
    whole = run_decode(paged, q, 1, splits=1)
    for splits in (2, 5, 16):
        again = run_decode(paged, q, 1, splits=splits)
        assert_close(again, whole)
        assert_same(again, run_decode(paged, q, 1, splits=splits, fused=False))


PREFILLS: list[tuple[Sequence[tuple[int, int]], int, int, int, dict[str, Any]]] = [
    ([(0, 1)], 2, 2, 16, {}),  # one token
    ([(0, 37)], 2, 1, 16, {}),
    (
        [(0, 5), (40, 1), (31, 18), (0, 1), (64, 33)],
        4,
        2,
        16,
        {"pad": 3},
    ),  # chunks with context, decodes between
    ([(70, 1), (3, 1), (0, 1)], 2, 1, 16, {}),
    ([(50, 20)], 7, 1, 24, {}),
    ([(80, 40), (0, 9)], 2, 1, 16, {"window": 20}),
    ([(100, 70)], 2, 1, 16, {"window": 64, "rows": 32}),
    ([(60, 12)], 2, 2, 16, {"window": 1}),
    ([(20, 20)], 4, 2, 16, {"softcap": 5.0}),
    ([(20, 20), (0, 3)], 4, 2, 16, {"sinks": True}),
    ([(150, 30), (7, 2)], 4, 1, 16, {"tile": 64, "window": 90, "sinks": True, "softcap": 9.0, "rows": 32}),
    ([(250, 20)], 2, 1, 16, {"tile": 128, "rows": 64}),
]


@pytest.mark.parametrize(("lengths", "heads", "kv_heads", "dim", "options"), PREFILLS)
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_prefill(
    lengths: list[tuple[int, int]], heads: int, kv_heads: int, dim: int, options: dict[str, Any], dtype: str
) -> None:
    more = dict(options)
    pad, sinks = more.pop("pad", 0), sink_values(heads, more.pop("sinks", False))
    window, softcap = more.get("window", 0), more.get("softcap", 0.0)
    paged = make_paged(lengths, kv_heads, dim, dtype, window=window, pad_sequences=pad, pad_tokens=pad)
    q = query(paged.tokens + pad, heads, dim, dtype)
    q[paged.tokens :] = float("nan")
    out = run_prefill(paged, q, kv_heads, sinks=sinks, **more)
    assert_close(out, expected(paged, q, sinks, window, softcap))


def test_prefill_agrees_with_decode() -> None:
    paged = make_paged([(90, 1), (33, 1)], 2, 16, "f32")
    q = query(2, 4, 16, "f32")
    assert_close(run_prefill(paged, q, 2), run_decode(paged, q, 2).clone())


DENSE: list[tuple[int, int, int, int, int, int, dict[str, Any]]] = [
    (1, 1, 2, 1, 16, 16, {}),
    (37, 37, 4, 2, 16, 16, {}),
    (37, 37, 2, 2, 24, 16, {"causal": False}),
    (5, 70, 2, 1, 16, 16, {}),
    (70, 70, 2, 1, 16, 16, {"window": 20}),
    (70, 70, 2, 1, 16, 16, {"window": 20, "causal": False}),
    (33, 33, 3, 1, 16, 40, {"softcap": 3.0, "sinks": True}),
]


@pytest.mark.parametrize(("queries", "keys", "heads", "kv_heads", "dim", "width", "options"), DENSE)
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_dense(
    queries: int,
    keys: int,
    heads: int,
    kv_heads: int,
    dim: int,
    width: int,
    options: dict[str, Any],
    dtype: str,
) -> None:
    causal, window = options.get("causal", True), options.get("window", 0)
    softcap, sinks = options.get("softcap", 0.0), sink_values(heads, options.get("sinks", False))
    generator = torch.Generator().manual_seed(1)
    q = query(queries, heads, dim, dtype)
    k = (
        torch.randn(keys, kv_heads, dim + 8, generator=generator)
        .to(q.dtype)
        .to(device())[:, :, :dim]
        .contiguous()
    )
    v = torch.randn(keys, kv_heads, width, generator=generator).to(q.dtype).to(device())
    out = Guarded((queries, heads, width), q.dtype)
    group = heads // kv_heads
    launch("attention:dense", (kv_heads, -(-queries // (16 // group))), {
        "q": q, "k": k, "v": v, "out": out.tensor, "sinks": sinks, "SINKS": sinks is not None, "QUERIES": queries,
        "KEYS": keys, "Q_STRIDE": heads * dim, "K_STRIDE": kv_heads * dim, "V_STRIDE": kv_heads * width,
        "OUT_STRIDE": heads * width, "H": heads, "HK": kv_heads, "G": group, "BQ": 16 // group, "BM": 16, "BN": 32,
        "D": dim, "DP": pow2(dim), "DV": width, "DVP": pow2(width), "SCALE": SCALE, "WINDOW": window,
        "SOFTCAP": softcap, "CAUSAL": causal,
    })  # fmt: skip
    want = attention(
        q.cpu().float(), k.cpu().float(), v.cpu().float(), None if sinks is None else sinks.cpu(), scale=SCALE,
        causal=causal, window=window, softcap=softcap,
    )  # fmt: skip
    assert_close(out.check(), want)


@pytest.mark.parametrize("capability", [80, 89, 90, 100])
def test_kernels_cross_compile(capability: int) -> None:
    """Both paged kernels at Llama-8B's shape fit into shared memory."""
    pointers = {
        "q": "*bf16",
        "cache": "*bf16",
        "out": "*bf16",
        "seq_lens": "*i32",
        "table": "*i32",
        "meta": "*i32",
    }
    shared = {
        "sinks": None, "SINKS": False, "Q_STRIDE": 4096, "OUT_STRIDE": 4096, "H": 32, "HK": 8, "G": 4, "D": 128,
        "DP": 128, "SCALE": 0.088, "WINDOW": 0, "SOFTCAP": 0.0,
    }  # fmt: skip
    limit = 227 << 10 if capability >= 90 else 99 << 10
    decode = pointers | shared | {
        "partial": "*fp32", "stats": "*fp32", "counters": "*i32", "GP": 4, "M": 16, "TILE": 64, "SPLITS": 4, "CHUNK": 4,
        "LEAST": 1,
        "FUSED": True,
    }  # fmt: skip
    prefill = pointers | shared | {"query_start": "*i32", "BQ": 16, "BM": 64, "BN": 64, "STEPS": 8}
    for pdl in (False, True) if capability >= 90 else (False,):
        for name, args, tiles in (("decode", decode, 2), ("prefill", prefill, 4)):
            meta = cross_compile(f"attention:{name}", args, capability=capability, num_stages=2, pdl=pdl)
            assert meta["shared"] <= limit
            if capability == 90:
                assert meta["shared"] > tiles * 64 * 128 * 2, "loads of keys and values are not pipelined"
