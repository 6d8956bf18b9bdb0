"""Products of many rows with a weight [N, K] in tiles, with what comes after them; K may be split over programs.

Rows of x and of weights past the end read the last one again and are not stored. With SPLIT each program leaves its sums
in ``partial``; the last one to arrive at a tile adds them in the order of splits, so that results do not depend on which
it was, and leaves the tile's counter zero.
"""

import triton
import triton.language as tl

from .ahead import warm
from .linear import finish
from .skinny import norm_factor


@triton.jit
def put(
    acc, up, bias, residual, out, m, n, rows, R_STRIDE: tl.constexpr, N: tl.constexpr, ACT: tl.constexpr,
    LIMIT: tl.constexpr, ALPHA: tl.constexpr, GATED: tl.constexpr, SWAP: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """A tile's sums to results at rows m and columns n."""
    if SWAP:
        acc = tl.trans(acc)
    second = None
    if GATED:
        second = up
        if SWAP:
            second = tl.trans(up)
    row = m.to(tl.int64)[:, None]
    column = n[None, :]
    inside = (row < rows) & (column < N)
    y = finish(
        acc, second, bias, residual, column, row * R_STRIDE + column, inside, N, ACT, LIMIT, ALPHA, DTYPE
    )
    tl.store(out + row * N + column, y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def plus_part(part, place, acc, up, SIZE: tl.constexpr, GATED: tl.constexpr):
    """Sums with those of one split."""
    acc += tl.load(part + place, cache_modifier=".cg")
    if GATED:
        up += tl.load(part + SIZE + place, cache_modifier=".cg")
    return acc, up


@triton.jit
def matmul(
    x,  # [rows, K]
    w,  # [N, K], or [2 * N, K] with GATED
    bias,  # [N] or [2 * N], or None
    residual,  # [rows, N] or None
    addend,  # [rows, K] or None: added to x before the norm, whose scale is applied to the sums (``skinny``); SPLIT is 1
    norm_weight,  # [K] or None, as addend and total
    total,  # [rows, K] or None: x + addend
    out,  # [rows, N]
    partial,  # f32 [SPLIT, tiles, 1 or 2, BM * BN], or None
    counters,  # int32 [tiles], zeros, or None
    rows,
    X_STRIDE: tl.constexpr, R_STRIDE: tl.constexpr, A_STRIDE: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SPLIT: tl.constexpr,
    SWAP: tl.constexpr,  # weights as the first operand: for BM below what a first operand must have
    GROUP: tl.constexpr,  # tiles of rows that go through all columns together
    AHEAD: tl.constexpr,  # tiles of weights asked into L2 before the wait, a power of two or 0
    ACT: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr, GATED: tl.constexpr, EPS: tl.constexpr,
    OFFSET: tl.constexpr, ROUND_FIRST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program for BM rows, BN columns (of both halves of a gated weight) and a SPLITth of K."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    dtype: tl.constexpr = x.dtype.element_ty
    precision: tl.constexpr = "ieee" if dtype == tl.float32 else "tf32"
    pid = tl.program_id(0)
    split = tl.program_id(1)
    columns: tl.constexpr = (N + BN - 1) // BN
    tiles_m = tl.cdiv(rows, BM)
    width = GROUP * columns
    first_m = pid // width * GROUP
    size = tl.minimum(tiles_m - first_m, GROUP)
    tile_m = first_m + pid % width % size
    tile_n = pid % width // size
    steps: tl.constexpr = ((K + BK - 1) // BK + SPLIT - 1) // SPLIT
    start = split * (steps * BK)
    n = tile_n * BN + tl.arange(0, BN)
    row = tl.minimum(n, N - 1)
    if 2 * N * K >= 2**31:
        row = row.to(tl.int64)
    w_up = w + tl.full((), N, tl.int64) * K
    if PDL and AHEAD > 0:
        warm(w, row, start, K, AHEAD * BK, 1024 // dtype.primitive_bitwidth)
        if GATED:
            warm(w_up, row, start, K, AHEAD * BK, 1024 // dtype.primitive_bitwidth)
        if norm_weight is not None:
            bits: tl.constexpr = norm_weight.dtype.element_ty.primitive_bitwidth
            warm(norm_weight, tl.zeros((1,), tl.int32), 0, K, AHEAD * BK, 1024 // bits)
    if PDL:
        tl.extra.cuda.gdc_wait()
    m = tile_m * BM + tl.arange(0, BM)
    source = tl.minimum(m, rows - 1).to(tl.int64)[:, None]
    at_x = x + source * X_STRIDE
    at_w = w + row[:, None] * K
    at_up = w_up + row[:, None] * K
    lines: tl.constexpr = BN if SWAP else BM
    across: tl.constexpr = BM if SWAP else BN
    acc = tl.zeros((lines, across), tl.float32)
    up = tl.zeros((lines if GATED else 1, across if GATED else 1), tl.float32)
    squares = tl.zeros((BM, BK // 8), tl.float32)
    for k in tl.range(start, tl.minimum(start + steps * BK, K), BK):
        column = (k + tl.arange(0, BK))[None, :]
        if K % BK != 0:
            a = tl.load(at_x + column, mask=column < K, other=0.0)
            b = tl.load(at_w + column, mask=column < K, other=0.0)
        else:
            a = tl.load(at_x + column)
            b = tl.load(at_w + column)
        if norm_weight is not None:
            v = tl.load(addend + source * A_STRIDE + column, mask=column < K, other=0.0)
            v = (a.to(tl.float32) + v.to(tl.float32)).to(dtype)
            mine = (m < rows)[:, None] & (column < K) & (tile_n == 0)
            tl.store(total + source * K + column, v, mask=mine)
            v = v.to(tl.float32)
            squares += tl.sum(tl.reshape(v * v, (BM, BK // 8, 8)), 2)
            a = (v * norm_factor(norm_weight, column, K, OFFSET, ROUND_FIRST)).to(dtype)
        if SWAP:
            acc = tl.dot(b, tl.trans(a), acc, input_precision=precision)
        else:
            acc = tl.dot(a, tl.trans(b), acc, input_precision=precision)
        if GATED:
            if K % BK != 0:
                c = tl.load(at_up + column, mask=column < K, other=0.0)
            else:
                c = tl.load(at_up + column)
            if SWAP:
                up = tl.dot(c, tl.trans(a), up, input_precision=precision)
            else:
                up = tl.dot(a, tl.trans(c), up, input_precision=precision)
    if norm_weight is not None:
        scale = tl.rsqrt(tl.sum(squares, 1) / K + EPS)
        scale = scale[None, :] if SWAP else scale[:, None]
        acc *= scale
        if GATED:
            up *= scale
    if SPLIT == 1:
        put(acc, up, bias, residual, out, m, n, rows, R_STRIDE, N, ACT, LIMIT, ALPHA, GATED, SWAP, dtype)
    else:
        sums: tl.constexpr = BM * BN * (2 if GATED else 1)
        tiles = tl.num_programs(0).to(tl.int64)
        place = tl.arange(0, lines)[:, None] * across + tl.arange(0, across)[None, :]
        part = partial + (split * tiles + pid) * sums
        tl.store(part + place, acc)
        if GATED:
            tl.store(part + BM * BN + place, up)
        tl.debug_barrier()  # all threads' sums are written before the one arrival is counted
        arrived = tl.atomic_add(counters + pid, 1, sem="acq_rel", scope="gpu")
        if arrived == SPLIT - 1:
            tl.store(counters + pid, 0)
            tl.debug_barrier()
            acc = tl.zeros((lines, across), tl.float32)
            up = tl.zeros((lines if GATED else 1, across if GATED else 1), tl.float32)
            if SPLIT * sums <= 32768:  # all loads on their way together, where registers suffice
                for s in tl.static_range(SPLIT):
                    acc, up = plus_part(partial + (s * tiles + pid) * sums, place, acc, up, BM * BN, GATED)
            else:
                for s in range(SPLIT):
                    acc, up = plus_part(partial + (s * tiles + pid) * sums, place, acc, up, BM * BN, GATED)
            put(acc, up, bias, residual, out, m, n, rows, R_STRIDE, N, ACT, LIMIT, ALPHA, GATED, SWAP, dtype)
