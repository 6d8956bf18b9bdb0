"""Norms, rotary, embedding, activations, vector math and the team, each against torch."""

import ctypes
import os
import threading
from collections.abc import Callable

import pytest
import torch

from . import linear as lib
from .attention import Machine, Shape
from .library import TARGETS, address, assert_close, build

BOTH = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "f32"])
EVERY_TARGET = pytest.mark.parametrize("target", TARGETS)


class NormCall(ctypes.Structure):
    _fields_ = [
        ("kind", ctypes.c_int),
        *[(name, ctypes.c_void_p) for name in ("x", "residual", "w", "b", "sum", "y")],
        *[(name, ctypes.c_int) for name in ("ld", "T", "K")],
        ("eps", ctypes.c_float),
        ("offset", ctypes.c_float),
        ("round_first", ctypes.c_int),
    ]


@BOTH
@EVERY_TARGET
@pytest.mark.parametrize("K", [64, 77], ids=["whole vectors", "a tail"])
@pytest.mark.parametrize("kind", ["llama", "gemma", "add", "bare", "layer", "add layer", "layer, rounded"])
def test_norms(kind: str, K: int, target: str, dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(K)
    T = 5
    x, residual = (torch.randn(T, K, generator=g).to(dtype) for _ in range(2))
    w, b = (torch.randn(K, generator=g).to(dtype) for _ in range(2))
    y, total = torch.full((2, T + 1, K), float("nan"), dtype=dtype)
    code = {"layer": 2, "layer, rounded": 2, "add layer": 3, "add": 1}.get(kind, 0)
    gemma, late = kind == "gemma", kind in ("gemma", "layer", "add layer")
    call = NormCall(code, address(x), address(residual), address(None if kind == "bare" else w), address(b),
                    address(total), address(y), K, T, K, 1e-5, float(gemma), int(not late))  # fmt: skip
    build("rows_lib.cpp", target).norm(2, int(dtype == torch.bfloat16), ctypes.byref(call))
    h = x + residual if "add" in kind else x
    if kind == "layer, rounded":
        normal = torch.nn.functional.layer_norm(h.float(), (K,), None, None, 1e-5).to(dtype)
        want = ((w * normal).to(dtype) + b).float()
    elif "layer" in kind:
        want = torch.nn.functional.layer_norm(h.float(), (K,), w.float(), b.float(), 1e-5)
    else:
        normal = h.float() * torch.rsqrt(h.float().square().mean(-1, keepdim=True) + 1e-5)
        want = {
            "gemma": lambda: normal * (1 + w.float()),
            "bare": lambda: normal,
        }.get(kind, lambda: (w * normal.to(dtype)).float())()
    assert_close(y[:T], want, dtype)
    if "add" in kind:
        assert torch.equal(total[:T], h)
    assert y[T:].isnan().all()


class QkvCall(ctypes.Structure):
    _fields_ = [
        *[(name, ctypes.c_void_p) for name in ("qkv", "q_out", "kv")],
        *[(name, ctypes.c_int) for name in ("ldqkv", "ldq", "T", "H", "Hk", "D", "rot_dim", "style")],
        *[(name, ctypes.c_void_p) for name in ("q_norm", "k_norm")],
        ("full_row", ctypes.c_int),
        *[
            (name, ctypes.c_void_p)
            for name in ("inv_freq", "cos", "sin", "positions", "query_start", "block_tables")
        ],
        *[(name, ctypes.c_int) for name in ("S", "max_blocks")],
    ]


@BOTH
@pytest.mark.parametrize(
    ("norm", "style", "rot_dim"),
    [("none", 0, 32), ("head", 0, 24), ("row", 0, 32), ("none", 1, 20)],
    ids=["plain", "head norm, partial", "row norm", "interleaved, partial"],
)
def test_qkv_rope_write(norm: str, style: int, rot_dim: int, dtype: torch.dtype) -> None:
    """Against the unfused graph: the queries directly, keys and values through attention over what was written."""
    g = torch.Generator().manual_seed(9)
    H, Hk, D, T = 4, 2, 32, 45
    qkv = torch.randn(T, (H + 2 * Hk) * D, generator=g).to(dtype)
    positions = torch.cat([torch.arange(5), torch.arange(40)]).to(torch.int32)
    starts = torch.tensor([0, 5, 45], dtype=torch.int32)
    tables = torch.tensor([[2, -1], [0, 1]], dtype=torch.int32)
    size = D if norm == "head" else H * D
    q_norm, k_norm = (
        torch.randn(size, generator=g).to(dtype),
        torch.randn(min(size, Hk * D), generator=g).to(dtype),
    )
    inv_freq = 1e4 ** -(torch.arange(0, rot_dim, 2).float() / rot_dim)
    cos, sin = torch.empty(2, T, rot_dim // 2)
    q_out = torch.full((T, H * D), float("nan"), dtype=dtype)
    shape = Shape(H, Hk, D)
    machine = Machine(TARGETS[0], shape, dtype, 3)
    call = QkvCall(
        qkv=address(qkv), q_out=address(q_out), kv=address(machine.cache), ldqkv=qkv.stride(0), ldq=H * D, T=T, H=H, Hk=Hk,
        D=D, rot_dim=rot_dim, style=style, full_row=int(norm == "row"), inv_freq=address(inv_freq), cos=address(cos),
        sin=address(sin), positions=address(positions), query_start=address(starts), block_tables=address(tables), S=2,
        max_blocks=2,
    )  # fmt: skip
    if norm != "none":
        call.q_norm, call.k_norm = address(q_norm), address(k_norm)
    build("rows_lib.cpp", TARGETS[0]).qkv(2, int(dtype == torch.bfloat16), ctypes.byref(call))

    angle = positions.float()[:, None] * inv_freq
    c, s = angle.cos().to(dtype)[:, None], angle.sin().to(dtype)[:, None]

    def normal(x: torch.Tensor, w: torch.Tensor, heads: int) -> torch.Tensor:
        if norm == "none":
            return x
        y = x.reshape(T, -1, D) if norm == "head" else x
        y = w * (y.float() * torch.rsqrt(y.float().square().mean(-1, keepdim=True) + 1e-6)).to(dtype)
        return y.reshape(T, heads * D)

    def rotate(x: torch.Tensor, heads: int) -> torch.Tensor:
        x = x.reshape(T, heads, D).clone()
        part = x[..., :rot_dim]
        a, b = (part[..., ::2], part[..., 1::2]) if style else part.chunk(2, -1)
        first, second = a * c - b * s, b * c + a * s
        joined = torch.stack([first, second], -1).flatten(-2) if style else torch.cat([first, second], -1)
        return torch.cat([joined, x[..., rot_dim:]], -1)

    q, k, v = torch.split(qkv, [H * D, Hk * D, Hk * D], -1)
    q, k = rotate(normal(q, q_norm, H), H), rotate(normal(k, k_norm, Hk), Hk)
    assert_close(q_out.reshape(T, H, D), q.double(), dtype)
    other = Machine(TARGETS[0], shape, dtype, 3)
    other.write(k.flatten(1), v.contiguous(), positions, starts, tables)
    kind = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
    got, want = machine.cache.view(kind).float(), other.cache.view(kind).float()
    assert torch.equal(got.isnan(), want.isnan())  # the same slots and no others
    assert_close(got.nan_to_num(), want.nan_to_num(), dtype)


class EmbedCall(ctypes.Structure):
    _fields_ = [
        ("layout", ctypes.c_int),
        *[(name, ctypes.c_void_p) for name in ("table", "ids", "y")],
        ("T", ctypes.c_int),
        ("K", ctypes.c_int),
        ("scale", ctypes.c_float),
    ]


@BOTH
@pytest.mark.parametrize("layout", [-1, lib.N16K2, lib.N16, lib.Q4_1, lib.Q4_0, lib.Q8_0])
def test_embedding(layout: int, dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(2)
    V, K = 50, 64
    weights = lib.make_weights(max(layout, lib.N16K2), V, K, g)
    table = weights.value.to(dtype) if layout < 0 else lib.pack(TARGETS[0], layout, weights.source, K)
    ids = torch.tensor([0, 49, 17, 17], dtype=torch.int32)
    y = torch.full((5, K), float("nan"), dtype=dtype)
    call = EmbedCall(layout, address(table), address(ids), address(y), 4, K, 24.0)
    build("rows_lib.cpp", TARGETS[0]).embed_rows(2, int(dtype == torch.bfloat16), ctypes.byref(call))
    assert torch.equal(y[:4], weights.value.to(dtype)[ids.long()] * 24)
    assert y[4:].isnan().all()


class ActCall(ctypes.Structure):
    _fields_ = [
        *[(name, ctypes.c_void_p) for name in ("gate", "up", "y")],
        *[(name, ctypes.c_int) for name in ("T", "F", "clamped")],
    ]


@BOTH
@EVERY_TARGET
def test_gated_activations(target: str, dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(6)
    T, F = 3, 37
    library, code = build("rows_lib.cpp", target), int(dtype == torch.bfloat16)
    gate, up = ((4 * torch.randn(T, F, generator=g)).to(dtype) for _ in range(2))
    y = torch.empty(T, F, dtype=dtype)
    library.activate(2, code, ctypes.byref(ActCall(address(gate), address(up), address(y), T, F, 0)))
    assert_close(y, (torch.nn.functional.silu(gate) * up).double(), dtype)
    both = torch.stack([gate, up], -1).flatten(1).contiguous()
    library.activate(2, code, ctypes.byref(ActCall(address(both), None, address(y), T, F, 1)))
    low, mid = gate.clamp(max=7), up.clamp(-7, 7)
    assert_close(y, ((mid + 1) * (low * torch.sigmoid(low * 1.702))).double(), dtype)


FUNCTIONS: list[tuple[str, Callable[[torch.Tensor], torch.Tensor], float, float]] = [
    ("exp", torch.exp, -100, 88), ("log", torch.log, 1e-38, 1e38), ("tanh", torch.tanh, -12, 12),
    ("sigmoid", torch.sigmoid, -80, 80), ("erf", torch.erf, -5, 5), ("gelu", torch.nn.functional.gelu, -4, 8),
    ("gelu_tanh", lambda x: torch.nn.functional.gelu(x, approximate="tanh"), -4, 8), ("sin", torch.sin, -9e4, 9e4),
    ("cos", torch.cos, -2e5, 2e5), ("rsqrt", torch.rsqrt, 1e-6, 1e6),
    ("log1p", torch.log1p, -0.99, 50), ("floor", torch.floor, -1e3, 1e3),
    ("round", torch.round, -1e3, 1e3), ("exp2", torch.exp2, -125, 127),
]  # fmt: skip


@EVERY_TARGET
@pytest.mark.parametrize("index", range(len(FUNCTIONS)), ids=[f[0] for f in FUNCTIONS])
def test_vector_math(index: int, target: str) -> None:
    name, reference, low, high = FUNCTIONS[index]
    x = torch.cat(
        [torch.linspace(low, high, 20011), torch.linspace(max(low, -2), min(high, 2), 5003)]
    ).float()
    y = torch.empty_like(x)
    build("rows_lib.cpp", target).math(index, address(x), address(y), x.numel())
    want = reference(x.double())
    absolute = {"sin": 4e-7, "cos": 4e-7, "gelu": 2e-7, "gelu_tanh": 2e-7, "log": 1e-7}.get(name, 1e-37)
    torch.testing.assert_close(y.double(), want, rtol=2e-6, atol=absolute)


@EVERY_TARGET
def test_special_values(target: str) -> None:
    library = build("rows_lib.cpp", target)
    inf, nan = float("inf"), float("nan")
    x = torch.tensor([inf, -inf, nan, 0.0, -1.0, 1e-41])
    y = torch.empty_like(x)
    library.math(0, address(x), address(y), x.numel())
    assert y[0] == inf and y[1] == 0 and y[2].isnan() and y[3] == 1
    library.math(1, address(x), address(y), x.numel())
    assert y[0] == inf and y[1].isnan() and y[2].isnan() and y[3] == -inf and y[4].isnan()
    library.math(2, address(x), address(y), x.numel())
    assert y[0] == 1 and y[1] == -1 and y[2].isnan()


@EVERY_TARGET
def test_bf16_rounding_is_torchs(target: str) -> None:
    """Ties to even, infinities, a NaN; every half float widens exactly."""
    library = build("rows_lib.cpp", target)
    bits = torch.randint(-(2**31), 2**31, (4096,), dtype=torch.int32)
    ties = (torch.arange(1024, dtype=torch.int32) << 16) + 0x3F808000
    x = torch.cat(
        [bits.view(torch.float32), ties.view(torch.float32), torch.tensor([float("inf"), float("nan")])]
    )
    x = torch.where(x.abs() < 1.2e-38, torch.zeros_like(x), x)  # denormals may be flushed
    y = torch.empty_like(x)
    library.round_to_bf16(address(x), address(y), x.numel())
    want = x.bfloat16().float()
    assert torch.equal(y.nan_to_num(7.0), want.nan_to_num(7.0))
    half = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.float16)
    wide = torch.empty(65536)
    library.widen_f16(address(half), address(wide), 65536)
    assert torch.equal(wide.nan_to_num(7.0), half.float().nan_to_num(7.0))


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_barrier(threads: int) -> None:
    """More threads than cores must still pass, and the team's size may change between runs."""
    library = build("rows_lib.cpp", TARGETS[0])
    for size in (threads, 1, threads):
        assert library.team_sums(size, 40) == 0


def test_team_serves_python_threads_and_a_forked_child() -> None:
    library = build("rows_lib.cpp", TARGETS[0])
    results: list[int] = []
    workers = [threading.Thread(target=lambda: results.append(library.team_sums(2, 50))) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert results == [0] * 4
    child = os.fork()
    if child == 0:
        os._exit(library.team_sums(2, 20))
    assert os.waitpid(child, 0)[1] == 0
