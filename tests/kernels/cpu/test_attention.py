"""Paged and dense attention on poisoned caches against softmax in float64."""

import pytest
import torch

from .attention import Machine, Sequences, Shape, reference
from .library import TARGETS, assert_close

SHAPES = {
    "gqa": Shape(6, 2, 64),
    "odd head size": Shape(4, 4, 18),
    "window": Shape(4, 2, 32, window=40),
    "softcap and sinks": Shape(4, 1, 32, softcap=5.0, sinks=True),
    "one kv head": Shape(5, 1, 128),
}
BATCHES = {
    "decode": Sequences(
        [(1, 1), (1, 33), (1, 300)]
    ),  # a first token, a block's edge, several chunks of blocks
    "one long decode": Sequences([(1, 700)]),  # shared between threads
    "prefill": Sequences([(70, 70)]),  # three row tiles, the last partial
    "mixed": Sequences(
        [(1, 65), (37, 37), (4, 50), (40, 330)]
    ),  # decode, prompt, verification, later chunk of a prompt
}


def check(target: str, shape: Shape, batch: Sequences, dtype: torch.dtype, threads: int = 2) -> None:
    g = torch.Generator().manual_seed(3)
    tables = batch.tables(g)
    machine = Machine(target, shape, dtype, int(tables.max()) + 1, threads)
    lens = torch.tensor([total for _, total in batch.lengths], dtype=torch.int32)
    k = torch.randn(int(lens.sum()), shape.Hk, shape.D, generator=g).to(dtype)
    v = torch.randn(int(lens.sum()), shape.Hk, shape.D, generator=g).to(dtype)
    all_starts = torch.tensor([0, *lens.cumsum(0)], dtype=torch.int32)
    positions = torch.cat([torch.arange(int(n)) for n in lens]).to(torch.int32)
    machine.write(k.flatten(1), v.flatten(1), positions, all_starts, tables)
    T = batch.tokens
    q = torch.full((T + 1, shape.H * shape.D + 8), float("nan"), dtype=dtype)
    q[:T, : shape.H * shape.D] = torch.randn(T, shape.H * shape.D, generator=g).to(dtype)
    out = torch.full((T + 1, shape.H * shape.D + 4), float("nan"), dtype=dtype)
    sinks = torch.randn(shape.H, generator=g) if shape.sinks else None
    machine.attend(q[:, : shape.H * shape.D], out, batch.starts(), lens, tables, sinks)
    at = 0
    for s, (n, total) in enumerate(batch.lengths):
        rows = slice(int(all_starts[s]), int(all_starts[s + 1]))
        mine = q[at : at + n, : shape.H * shape.D].reshape(n, shape.H, shape.D)
        want = reference(shape, mine, k[rows], v[rows], total - n, sinks)
        assert_close(out[at : at + n, : shape.H * shape.D].reshape(n, shape.H, shape.D), want, dtype)
        at += n
    assert out[T:].isnan().all() and out[:, shape.H * shape.D :].isnan().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "f32"])
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("target", TARGETS[:2])
def test_paged(target: str, shape: str, batch: str, dtype: torch.dtype) -> None:
    check(target, SHAPES[shape], BATCHES[batch], dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "f32"])
@pytest.mark.parametrize("target", TARGETS[2:])
def test_paged_on_lesser_targets(target: str, dtype: torch.dtype) -> None:
    check(target, SHAPES["odd head size"], BATCHES["mixed"], dtype)


@pytest.mark.parametrize("threads", [1, 3, 7])
def test_shares_that_split_items(threads: int) -> None:
    """Seven threads over one sequence: some lie wholly inside an item."""
    check(TARGETS[0], SHAPES["one kv head"], BATCHES["one long decode"], torch.float32, threads)
    check(TARGETS[0], SHAPES["gqa"], BATCHES["mixed"], torch.bfloat16, threads)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "f32"])
@pytest.mark.parametrize("window", [0, 12], ids=["full", "window"])
def test_dense_bidirectional_segments(window: int, dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(4)
    shape = Shape(4, 2, 24, window=window, causal=False)
    machine = Machine(TARGETS[0], shape, dtype, 1)
    starts = torch.tensor([0, 5, 5, 42], dtype=torch.int32)  # a short segment, an empty one, two blocks
    q = torch.randn(42, shape.H, shape.D, generator=g).to(dtype)
    k = torch.randn(42, shape.Hk, shape.D, generator=g).to(dtype)
    v = torch.randn(42, shape.Hk, shape.D, generator=g).to(dtype)
    out = torch.full((42, shape.H * shape.D), float("nan"), dtype=dtype)
    machine.dense(q.flatten(1), k.flatten(1), v.flatten(1), out, starts)
    for a, b in ((0, 5), (5, 42)):
        want = reference(shape, q[a:b], k[a:b], v[a:b], 0, None)
        assert_close(out[a:b].reshape(b - a, shape.H, shape.D), want, dtype)
