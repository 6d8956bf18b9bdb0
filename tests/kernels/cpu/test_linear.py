"""Linears of every layout, regime and target against torch in float64."""

import pytest
import torch

from . import linear as lib
from .library import TARGETS, assert_close, build
from .linear import FLOAT, GATED, GELU, LOGITS, N16, N16K2, Q4_0, Q4_1, Q8_0, RESIDUAL, STORE

LAYOUTS = [N16K2, N16, Q4_1, Q4_0, Q8_0]
# (T, N, K, reason)
SIZES = [
    (1, 96, 64, "one row, whole panels"),
    (1, 41, 96, "one row, a masked last panel"),
    (3, 48, 64, "few rows: one partial row tile, an odd number of panels"),
    (17, 80, 96, "one row more than a tile"),
    (70, 33, 128, "many rows, three row blocks with a tail, masked columns"),
]
SMALL = [SIZES[1], SIZES[3]]  # for targets that matter less


def cases() -> list[object]:
    return [
        pytest.param(target, *size[:3], id=f"{target}-{size[3].replace(' ', '_')}")
        for target in TARGETS
        for size in (SIZES if target.startswith("avx512") else SMALL)
    ]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "f32"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("target", "T", "N", "K"), cases())
def test_linear(target: str, T: int, N: int, K: int, layout: int, dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(T * N + K + layout)
    weights = lib.make_weights(layout, N, K, g)
    packed = lib.pack(target, layout, weights.source, K)
    x = torch.full((T + 2, K + 5), float("nan"), dtype=dtype)
    x[:T, :K] = torch.randn(T, K, generator=g).to(dtype)
    y = torch.full((T + 2, N + 3), float("nan"), dtype=dtype)
    lib.run(target, layout, x[:, :K], packed, N, y, T=T)
    assert_close(y[:T, :N], x[:T, :K].double() @ weights.value.double().T, dtype)
    assert y[T:].isnan().all() and y[:, N:].isnan().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "f32"])
@pytest.mark.parametrize("T", [1, 5, 70], ids=["one row", "few rows", "many rows"])
@pytest.mark.parametrize("epilogue", [STORE, RESIDUAL, GATED, GELU, LOGITS])
@pytest.mark.parametrize("target", TARGETS[:1])
def test_epilogues(target: str, epilogue: int, T: int, dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(epilogue)
    N, K = 96, 50  # K is no multiple of 32: rows of x are padded
    layout = N16K2 if dtype == torch.bfloat16 else N16
    weights = lib.make_weights(layout, N, K, g)
    x = torch.randn(T, K, generator=g).to(dtype)
    bias = torch.randn(N, generator=g).to(dtype)
    library = build("linear_lib.cpp", target)
    packed = lib.aligned(lib.packed_size(library, layout, N, K))
    F = N // 2 if epilogue == GATED else N
    if epilogue == GATED:
        lib.pack_into(library, layout, packed, weights.source[:F], K, 0, 2)
        lib.pack_into(library, layout, packed, weights.source[F:].contiguous(), K, 16, 2)
        given = bias.view(2, F // 16, 16).transpose(0, 1).reshape(-1).contiguous()
    else:
        lib.pack_into(library, layout, packed, weights.source, K)
        given = bias
    residual = torch.randn(T, N, generator=g).to(dtype)
    y = torch.full((T, F), float("nan"), dtype=torch.float32 if epilogue == LOGITS else dtype)
    lib.run(target, layout, x, packed, N, y, epilogue=epilogue, bias=given, residual=residual)
    z = (x.double() @ weights.value.double().T + bias.double()).to(dtype)
    want = {
        STORE: lambda: z,
        RESIDUAL: lambda: residual + z,
        GATED: lambda: torch.nn.functional.silu(z[:, :F]) * z[:, F:],
        GELU: lambda: torch.nn.functional.gelu(z, approximate="tanh"),
        LOGITS: lambda: 30 * torch.tanh(z / 30),
    }[epilogue]()
    assert_close(y, want.double(), dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "f32"])
@pytest.mark.parametrize("target", TARGETS[:2])
def test_experts(target: str, dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(5)
    E, N, K, T = 5, 40, 64, 12
    layout = N16K2 if dtype == torch.bfloat16 else N16
    weights = [lib.make_weights(layout, N, K, g) for _ in range(E)]
    packed = [lib.pack(target, layout, w.source, K) for w in weights]
    x = torch.randn(T, K, generator=g).to(dtype)
    counts = [3, 0, 1, 0, 17]  # experts with few, no, one and many items
    start = torch.tensor([0, *torch.tensor(counts).cumsum(0)], dtype=torch.int32)
    rows = torch.randint(0, T, (int(start[-1]),), generator=g, dtype=torch.int32)
    y = torch.full((len(rows), N), float("nan"), dtype=dtype)
    joined = lib.aligned(E * packed[0].numel()).copy_(torch.cat(packed))
    lib.run(target, layout, x, joined, N, y, rows=rows, start=start, expert_bytes=packed[0].numel())
    for e in range(E):
        s = slice(int(start[e]), int(start[e + 1]))
        assert_close(y[s], x[rows[s].long()].double() @ weights[e].value.double().T, dtype) if counts[
            e
        ] else None


@pytest.mark.parametrize("layout", [Q4_1, Q4_0, Q8_0])
def test_packed_codes_err_no_more_than_bf16_weights(layout: int) -> None:
    """A matrix-vector product from codes must not lose what bf16 activations did not lose already."""
    g = torch.Generator().manual_seed(layout)
    N, K = 256, 576
    weights = lib.make_weights(layout, N, K, g)
    x = torch.randn(1, K, generator=g).bfloat16()
    exact = x.double() @ weights.value.double().T
    y = torch.empty(1, N, dtype=torch.float32)
    lib.run(TARGETS[0], layout, x, lib.pack(TARGETS[0], layout, weights.source, K), N, y, epilogue=FLOAT)
    bf16 = x.double() @ weights.value.bfloat16().double().T
    assert (y - exact).abs().mean() <= 0.1 * (bf16 - exact).abs().mean()


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_thread_counts_agree_bit_for_bit(threads: int) -> None:
    g = torch.Generator().manual_seed(1)
    weights = lib.make_weights(N16K2, 80, 96, g)
    packed = lib.pack(TARGETS[0], N16K2, weights.source, 96)
    x = torch.randn(9, 96, generator=g).bfloat16()
    one, many = torch.empty(9, 80).bfloat16(), torch.empty(9, 80).bfloat16()
    lib.run(TARGETS[0], N16K2, x, packed, 80, one, threads=1)
    lib.run(TARGETS[0], N16K2, x, packed, 80, many, threads=threads)
    assert torch.equal(one, many)
