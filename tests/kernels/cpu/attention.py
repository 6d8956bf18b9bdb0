"""Calls of the attention test library, and the reference in float64."""

import ctypes
from dataclasses import dataclass

import torch

from .library import address, build
from .linear import aligned

BLOCK = 32


class Call(ctypes.Structure):
    _fields_ = [
        *[(name, ctypes.c_void_p) for name in ("q", "k", "v", "out", "kv")],
        *[(name, ctypes.c_int) for name in ("ldq", "ldk", "ldv", "ldo", "T", "H", "Hk", "D")],
        ("scale", ctypes.c_float),
        ("window", ctypes.c_int),
        ("softcap", ctypes.c_float),
        ("causal", ctypes.c_int),
        ("sinks", ctypes.c_void_p),
        ("S", ctypes.c_int),
        *[(name, ctypes.c_void_p) for name in ("query_start", "seq_lens", "block_tables")],
        ("max_blocks", ctypes.c_int),
        ("positions", ctypes.c_void_p),
        ("repeats", ctypes.c_int),
    ]


@dataclass(frozen=True)
class Shape:
    H: int
    Hk: int
    D: int
    window: int = 0
    softcap: float = 0.0
    causal: bool = True
    sinks: bool = False


@dataclass(frozen=True)
class Sequences:
    """lengths: (query tokens, all tokens) of each sequence."""

    lengths: list[tuple[int, int]]

    @property
    def tokens(self) -> int:
        return sum(n for n, _ in self.lengths)

    def starts(self) -> torch.Tensor:
        counts = torch.tensor([0, *[n for n, _ in self.lengths]])
        return counts.cumsum(0).to(torch.int32)

    def tables(self, generator: torch.Generator) -> torch.Tensor:
        """Blocks in random order, -1 where there is none."""
        counts = [-(-total // BLOCK) for _, total in self.lengths]
        order = torch.randperm(sum(counts), generator=generator).to(torch.int32)
        tables = torch.full((len(counts), max(counts)), -1, dtype=torch.int32)
        at = 0
        for s, count in enumerate(counts):
            tables[s, :count] = order[at : at + count]
            at += count
        return tables


class Machine:
    """One cache and the calls on it."""

    def __init__(self, target: str, shape: Shape, dtype: torch.dtype, blocks: int, threads: int = 2) -> None:
        self.shape, self.dtype, self.threads = shape, dtype, threads
        self.library = build("attention_lib.cpp", target)
        self.library.block_bytes.restype = ctypes.c_size_t
        self.is_bf16 = int(dtype == torch.bfloat16)
        size = int(self.library.block_bytes(self.is_bf16, shape.Hk, shape.D))
        self.cache = aligned(blocks * size)  # 0xFF: every element a NaN

    def _call(self, **fields: object) -> Call:
        s = self.shape
        call = Call(
            H=s.H, Hk=s.Hk, D=s.D, window=s.window, softcap=s.softcap, causal=int(s.causal), repeats=1
        )
        call.scale = s.D**-0.5
        call.kv = address(self.cache)
        for name, value in fields.items():
            setattr(call, name, address(value) if isinstance(value, torch.Tensor) else value)
        return call

    def write(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        positions: torch.Tensor,
        starts: torch.Tensor,
        tables: torch.Tensor,
    ) -> None:
        call = self._call(
            k=k, v=v, ldk=k.stride(0), ldv=v.stride(0), T=k.shape[0], positions=positions, query_start=starts,
            block_tables=tables, max_blocks=tables.shape[1], S=tables.shape[0],
        )  # fmt: skip
        self.library.write_cache(self.threads, self.is_bf16, ctypes.byref(call))

    def attend(
        self, q: torch.Tensor, out: torch.Tensor, starts: torch.Tensor, seq_lens: torch.Tensor, tables: torch.Tensor,
        sinks: torch.Tensor | None = None, repeats: int = 1,
    ) -> None:  # fmt: skip
        call = self._call(
            q=q, out=out, ldq=q.stride(0), ldo=out.stride(0), query_start=starts, seq_lens=seq_lens,
            block_tables=tables, max_blocks=tables.shape[1], S=tables.shape[0], repeats=repeats,
        )  # fmt: skip
        if sinks is not None:
            call.sinks = address(sinks)
        self.library.attention(self.threads, self.is_bf16, ctypes.byref(call))

    def dense(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, starts: torch.Tensor
    ) -> None:
        call = self._call(
            q=q, k=k, v=v, out=out, ldq=q.stride(0), ldk=k.stride(0), ldv=v.stride(0), ldo=out.stride(0),
            query_start=starts, S=starts.numel() - 1,
        )  # fmt: skip
        self.library.dense(self.threads, self.is_bf16, ctypes.byref(call))


def reference(
    shape: Shape, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, position: int, sinks: torch.Tensor | None
) -> torch.Tensor:
    """One sequence: q [n, H, D] from `position` on, k and v [m, Hk, D]; float64."""
    group = shape.H // shape.Hk
    q, k, v = q.double(), k.double().repeat_interleave(group, 1), v.double().repeat_interleave(group, 1)
    s = torch.einsum("nhd,mhd->hnm", q, k) * shape.D**-0.5
    if shape.softcap:
        s = shape.softcap * torch.tanh(s / shape.softcap)
    i, j = torch.arange(len(q))[:, None] + position, torch.arange(len(k))[None]
    visible = (j <= i) if shape.causal else torch.ones_like(i + j, dtype=torch.bool)
    if shape.window:
        visible = visible & ((i - j).abs() < shape.window)
    s = s.masked_fill(~visible, float("-inf"))
    if sinks is not None:
        column = sinks.double()[:, None, None].expand(-1, len(q), 1)
        s = torch.cat([s, column], -1).softmax(-1)[..., :-1]
    else:
        s = s.softmax(-1)
    return torch.einsum("hnm,mhd->nhd", s, v)
