"""Calls of the linear test library: packing, GGUF blocks and their float values."""

import ctypes
from dataclasses import dataclass

import torch

from .library import address, build

N16K2, N16, Q4_1, Q4_0, Q8_0 = range(5)
STORE, RESIDUAL, GATED, GELU, LOGITS, FLOAT = range(6)
_SOURCES = {torch.float32: 0, torch.bfloat16: 1, torch.uint8: 2, torch.float16: 3}


class Call(ctypes.Structure):
    _fields_ = [
        ("epilogue", ctypes.c_int),
        ("x", ctypes.c_void_p),
        ("ldx", ctypes.c_int),
        ("T", ctypes.c_int),
        ("w", ctypes.c_void_p),
        ("N", ctypes.c_int),
        ("K", ctypes.c_int),
        ("y", ctypes.c_void_p),
        ("ldy", ctypes.c_int),
        ("bias", ctypes.c_void_p),
        ("residual", ctypes.c_void_p),
        ("ldr", ctypes.c_int),
        ("rows", ctypes.c_void_p),
        ("start", ctypes.c_void_p),
        ("E", ctypes.c_int),
        ("expert_bytes", ctypes.c_size_t),
        ("repeats", ctypes.c_int),
        ("w_stride", ctypes.c_size_t),
    ]


@dataclass(frozen=True)
class Weights:
    """source: what the packer reads ([N, K] floats or raw blocks [N, bytes]); value: its floats, [N, K]."""

    source: torch.Tensor
    value: torch.Tensor


def make_weights(layout: int, N: int, K: int, generator: torch.Generator) -> Weights:
    if layout in (N16K2, N16):
        dtype = torch.bfloat16 if layout == N16K2 else torch.float32
        source = (torch.randn(N, K, generator=generator) / K**0.5).to(dtype)
        return Weights(source, source.float())
    blocks = K // 32
    scale = ((torch.rand(N, blocks, 1, generator=generator) + 0.5) / K**0.5 / 8).half()
    parts = [scale.view(torch.uint8)]
    if layout == Q8_0:
        codes = torch.randint(-128, 128, (N, blocks, 32), generator=generator)
        parts.append(codes.to(torch.int8).view(torch.uint8))
        value = codes * scale.float() / 1.0
    else:
        codes = torch.randint(0, 16, (N, blocks, 32), generator=generator)
        value = (codes - (8 if layout == Q4_0 else 0)) * scale.float()
        if layout == Q4_1:
            low = (torch.randn(N, blocks, 1, generator=generator) / K**0.5).half()
            parts.append(low.view(torch.uint8))
            value = value + low.float()
        parts.append((codes[..., :16] | (codes[..., 16:] << 4)).to(torch.uint8))
    return Weights(torch.cat(parts, dim=-1).reshape(N, -1).contiguous(), value.reshape(N, K))


def aligned(size: int) -> torch.Tensor:
    """uint8 memory at a multiple of 64 bytes, poisoned."""
    raw = torch.full((size + 64,), 0xFF, dtype=torch.uint8)
    skip = -raw.data_ptr() % 64
    return raw[skip : skip + size]


def packed_size(library: ctypes.CDLL, layout: int, N: int, K: int) -> int:
    library.weight_bytes.restype = ctypes.c_size_t
    return int(library.weight_bytes(layout, ctypes.c_int64(N), ctypes.c_int64(K)))


def pack_into(
    library: ctypes.CDLL,
    layout: int,
    to: torch.Tensor,
    source: torch.Tensor,
    K: int,
    row: int = 0,
    stride: int = 1,
) -> None:
    library.pack(
        layout,
        _SOURCES[source.dtype],
        address(to),
        address(source),
        ctypes.c_int64(source.shape[0]),
        ctypes.c_int64(K),
        ctypes.c_int64(row),
        ctypes.c_int64(stride),
    )


def pack(target: str, layout: int, source: torch.Tensor, K: int) -> torch.Tensor:
    library = build("linear_lib.cpp", target)
    packed = aligned(packed_size(library, layout, source.shape[0], K))
    pack_into(library, layout, packed, source, K)
    return packed


def run(
    target: str,
    layout: int,
    x: torch.Tensor,
    packed: torch.Tensor,
    N: int,
    y: torch.Tensor,
    *,
    epilogue: int = STORE,
    T: int | None = None,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    rows: torch.Tensor | None = None,
    start: torch.Tensor | None = None,
    expert_bytes: int = 0,
    threads: int = 2,
    repeats: int = 1,
    w_stride: int = 0,
) -> None:
    """x [*, K] (any row stride) meets packed weights; y is written in place."""
    call = Call(
        epilogue,
        address(x),
        x.stride(0),
        x.shape[0] if T is None else T,
        address(packed),
        N,
        x.shape[1],
        address(y),
        y.stride(0),
        address(bias),
        address(residual),
        0 if residual is None else residual.stride(0),
        address(rows),
        address(start),
        0 if start is None else start.numel() - 1,
        expert_bytes,
        repeats,
        w_stride,
    )
    build("linear_lib.cpp", target).linear_call(
        threads, layout, int(x.dtype == torch.bfloat16), ctypes.byref(call)
    )
