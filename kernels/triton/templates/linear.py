"""Products of rows with a weight [N, K], with what comes before them (residual add and norm) and after them (bias,
activation, gate, residual).

Sums are f32, rounded where the separate ops would. A gated weight is [2 * N, K]: gate rows, then as many up rows. Rows
of weights past the end read the last one again and are not stored; so do rows of x in ``matmul``.
"""

import triton
import triton.language as tl

from .act import act
from .experts import gated, rounded
from .norm import _scaled


@triton.jit
def finish(
    y, up, bias, residual, n, at, inside,
    N: tl.constexpr, ACT: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """f32 sums [rows, columns] (``up`` None or like them) to results. n: columns; at: where the residual has them."""
    if bias is not None:
        y += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)
    if up is not None:
        if bias is not None:
            up += tl.load(bias + N + n, mask=n < N, other=0.0).to(tl.float32)
        return gated(y, up, ACT, LIMIT, ALPHA, DTYPE)
    elif ACT != "identity":
        return act(rounded(y, DTYPE), ACT)
    elif residual is not None:
        return rounded(y, DTYPE) + tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
    else:
        return y


@triton.jit
def weight_tile(w, row, start, K: tl.constexpr, BK: tl.constexpr):
    """[BN, BK] of weights, zeros past K. row: [BN], as int64 where the weight is that large."""
    column = start + tl.arange(0, BK)
    at = w + row[:, None] * K + column[None, :]
    if K % BK != 0:
        return tl.load(at, mask=(column < K)[None, :], other=0.0, eviction_policy="evict_first")
    else:
        return tl.load(at, eviction_policy="evict_first")


@triton.jit
def weight_rows(first, N: tl.constexpr, K: tl.constexpr, BN: tl.constexpr):
    """Rows of weights from ``first`` on, for one half of a gated weight."""
    row = tl.minimum(first + tl.arange(0, BN), N - 1)
    if 2 * N * K >= 2**31:
        row = row.to(tl.int64)
    return row


@triton.jit
def row_piece(
    x, addend, rows, start, t: tl.constexpr, X_STRIDE: tl.constexpr, A_STRIDE: tl.constexpr, K: tl.constexpr,
    BK: tl.constexpr,
):  # fmt: skip
    """f32 [1, BK] of row t, the addend added and rounded; zeros past K and for a row that is not there."""
    column = (start + tl.arange(0, BK))[None, :]
    if K % BK != 0 or t > 0:
        inside = (column < K) & (t < rows)
        v = tl.load(x + t * X_STRIDE + column, mask=inside, other=0.0)
        if addend is not None:
            v = (
                v.to(tl.float32)
                + tl.load(addend + t * A_STRIDE + column, mask=inside, other=0.0).to(tl.float32)
            ).to(v.dtype)
    else:
        v = tl.load(x + t * X_STRIDE + column)
        if addend is not None:
            v = (v.to(tl.float32) + tl.load(addend + t * A_STRIDE + column).to(tl.float32)).to(v.dtype)
    return v.to(tl.float32)


@triton.jit
def store_piece(total, v, rows, start, first, t: tl.constexpr, K: tl.constexpr, BK: tl.constexpr):
    """The sum's part; ``first``: whether this program is the one that writes it."""
    column = (start + tl.arange(0, BK))[None, :]
    tl.store(total + t * K + column, v.to(total.dtype.element_ty), mask=first & (column < K) & (t < rows))


@triton.jit
def row_scale(
    x, addend, total, rows, first, t: tl.constexpr, X_STRIDE: tl.constexpr, A_STRIDE: tl.constexpr, K: tl.constexpr,
    BK: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    """1 / sqrt(mean square + eps) of row t as [1, 1]; the first program writes the sum."""
    squares = tl.zeros((1, BK), tl.float32)
    for start in range(0, K, BK):
        v = row_piece(x, addend, rows, start, t, X_STRIDE, A_STRIDE, K, BK)
        store_piece(total, v, rows, start, first, t, K, BK)
        squares += v * v
    return tl.rsqrt(tl.sum(squares, 1, keep_dims=True) / K + EPS)


@triton.jit
def normed(
    v, scale, norm_weight, start, DTYPE: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, OFFSET: tl.constexpr,
    ROUND_FIRST: tl.constexpr,
):  # fmt: skip
    """v [1, BK] scaled, times the norm's weight, rounded to DTYPE."""
    column = (start + tl.arange(0, BK))[None, :]
    g = tl.load(norm_weight + column, mask=column < K, other=0.0).to(tl.float32)
    return rounded(_scaled(v * scale, g, None, norm_weight, None, DTYPE, OFFSET, ROUND_FIRST), DTYPE)


@triton.jit
def gemv_row(
    x, addend, norm_weight, rows, scale, tile, tile_up, acc, acc_up, start, t: tl.constexpr, X_STRIDE: tl.constexpr,
    A_STRIDE: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, OFFSET: tl.constexpr, ROUND_FIRST: tl.constexpr,
):  # fmt: skip
    """acc and acc_up (None without a gate) with row t's products added."""
    v = row_piece(x, addend, rows, start, t, X_STRIDE, A_STRIDE, K, BK)
    if norm_weight is not None:
        v = normed(v, scale, norm_weight, start, x.dtype.element_ty, K, BK, OFFSET, ROUND_FIRST)
    acc += tile.to(tl.float32) * v
    if tile_up is not None:
        acc_up += tile_up.to(tl.float32) * v
    return acc, acc_up


@triton.jit
def gemv_step(
    x, addend, norm_weight, rows, s0, s1, s2, s3, tile, tile_up, a0, a1, a2, a3, u0, u1, u2, u3, start, T: tl.constexpr,
    X_STRIDE: tl.constexpr, A_STRIDE: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, OFFSET: tl.constexpr,
    ROUND_FIRST: tl.constexpr,
):  # fmt: skip
    """One tile of weights times all rows."""
    a0, u0 = gemv_row(
        x,
        addend,
        norm_weight,
        rows,
        s0,
        tile,
        tile_up,
        a0,
        u0,
        start,
        0,
        X_STRIDE,
        A_STRIDE,
        K,
        BK,
        OFFSET,
        ROUND_FIRST,
    )
    if T > 1:
        a1, u1 = gemv_row(
            x, addend, norm_weight, rows, s1, tile, tile_up, a1, u1, start, 1, X_STRIDE, A_STRIDE, K, BK, OFFSET,
            ROUND_FIRST,
        )  # fmt: skip
    if T > 2:
        a2, u2 = gemv_row(
            x, addend, norm_weight, rows, s2, tile, tile_up, a2, u2, start, 2, X_STRIDE, A_STRIDE, K, BK, OFFSET,
            ROUND_FIRST,
        )  # fmt: skip
    if T > 3:
        a3, u3 = gemv_row(
            x, addend, norm_weight, rows, s3, tile, tile_up, a3, u3, start, 3, X_STRIDE, A_STRIDE, K, BK, OFFSET,
            ROUND_FIRST,
        )  # fmt: skip
    return a0, a1, a2, a3, u0, u1, u2, u3


@triton.jit
def gemv_store(
    acc, acc_up, bias, residual, out, n, rows, t: tl.constexpr, R_STRIDE: tl.constexpr, N: tl.constexpr,
    ACT: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr, GATED: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Row t's results: acc [BN, BK] is summed over columns."""
    inside = (n < N) & (t < rows)
    up = None
    if GATED:
        up = tl.sum(acc_up, 1, keep_dims=True)
    y = tl.sum(acc, 1, keep_dims=True)
    y = finish(y, up, bias, residual, n, t * R_STRIDE + n, inside, N, ACT, LIMIT, ALPHA, DTYPE)
    tl.store(out + t * N + n, y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def gemv(
    x,  # [rows, K]
    w,  # [N, K], or [2 * N, K] with GATED
    bias,  # [N] or [2 * N], or None
    residual,  # [rows, N] or None: added to the result
    addend,  # [rows, K] or None: added to x before the norm
    norm_weight,  # [K] or None
    total,  # [rows, K] or None: x + addend
    out,  # [rows, N]
    rows,  # at most T
    X_STRIDE: tl.constexpr, R_STRIDE: tl.constexpr, A_STRIDE: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    T: tl.constexpr,  # 1 to 4
    BN: tl.constexpr, BK: tl.constexpr,
    PRE: tl.constexpr,  # tiles loaded before the wait, at most K / BK and 4
    SCALE_BK: tl.constexpr,  # columns of a step of the norm's sum of squares
    ACT: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr, GATED: tl.constexpr, EPS: tl.constexpr,
    OFFSET: tl.constexpr, ROUND_FIRST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Few rows: a program for BN columns, weights read in tiles of BN x BK."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    pid = tl.program_id(0)
    row = weight_rows(pid * BN, N, K, BN)
    w_up = w + tl.full((), N, tl.int64) * K
    p0, p1, p2, p3 = None, None, None, None
    q0, q1, q2, q3 = None, None, None, None
    if PRE > 0:
        p0 = weight_tile(w, row, 0, K, BK)
        if GATED:
            q0 = weight_tile(w_up, row, 0, K, BK)
    if PRE > 1:
        p1 = weight_tile(w, row, BK, K, BK)
        if GATED:
            q1 = weight_tile(w_up, row, BK, K, BK)
    if PRE > 2:
        p2 = weight_tile(w, row, 2 * BK, K, BK)
        if GATED:
            q2 = weight_tile(w_up, row, 2 * BK, K, BK)
    if PRE > 3:
        p3 = weight_tile(w, row, 3 * BK, K, BK)
        if GATED:
            q3 = weight_tile(w_up, row, 3 * BK, K, BK)
    if PDL:
        tl.extra.cuda.gdc_wait()
    s0, s1, s2, s3 = 1.0, 1.0, 1.0, 1.0
    if norm_weight is not None:
        s0 = row_scale(x, addend, total, rows, pid == 0, 0, X_STRIDE, A_STRIDE, K, SCALE_BK, EPS)
        if T > 1:
            s1 = row_scale(x, addend, total, rows, pid == 0, 1, X_STRIDE, A_STRIDE, K, SCALE_BK, EPS)
        if T > 2:
            s2 = row_scale(x, addend, total, rows, pid == 0, 2, X_STRIDE, A_STRIDE, K, SCALE_BK, EPS)
        if T > 3:
            s3 = row_scale(x, addend, total, rows, pid == 0, 3, X_STRIDE, A_STRIDE, K, SCALE_BK, EPS)
    # What a launch has no use for stays a single zero, which compiles to nothing.
    a0 = tl.zeros((BN, BK), tl.float32)
    a1 = tl.zeros((BN if T > 1 else 1, BK if T > 1 else 1), tl.float32)
    a2 = tl.zeros((BN if T > 2 else 1, BK if T > 2 else 1), tl.float32)
    a3 = tl.zeros((BN if T > 3 else 1, BK if T > 3 else 1), tl.float32)
    u0 = tl.zeros((BN if GATED else 1, BK if GATED else 1), tl.float32)
    u1 = tl.zeros((BN if GATED and T > 1 else 1, BK if GATED and T > 1 else 1), tl.float32)
    u2 = tl.zeros((BN if GATED and T > 2 else 1, BK if GATED and T > 2 else 1), tl.float32)
    u3 = tl.zeros((BN if GATED and T > 3 else 1, BK if GATED and T > 3 else 1), tl.float32)
    if PRE > 0:
        a0, a1, a2, a3, u0, u1, u2, u3 = gemv_step(
            x, addend, norm_weight, rows, s0, s1, s2, s3, p0, q0, a0, a1, a2, a3, u0, u1, u2, u3, 0, T, X_STRIDE,
            A_STRIDE, K, BK, OFFSET, ROUND_FIRST,
        )  # fmt: skip
    if PRE > 1:
        a0, a1, a2, a3, u0, u1, u2, u3 = gemv_step(
            x, addend, norm_weight, rows, s0, s1, s2, s3, p1, q1, a0, a1, a2, a3, u0, u1, u2, u3, BK, T, X_STRIDE,
            A_STRIDE, K, BK, OFFSET, ROUND_FIRST,
        )  # fmt: skip
    if PRE > 2:
        a0, a1, a2, a3, u0, u1, u2, u3 = gemv_step(
            x, addend, norm_weight, rows, s0, s1, s2, s3, p2, q2, a0, a1, a2, a3, u0, u1, u2, u3, 2 * BK, T, X_STRIDE,
            A_STRIDE, K, BK, OFFSET, ROUND_FIRST,
        )  # fmt: skip
    if PRE > 3:
        a0, a1, a2, a3, u0, u1, u2, u3 = gemv_step(
            x, addend, norm_weight, rows, s0, s1, s2, s3, p3, q3, a0, a1, a2, a3, u0, u1, u2, u3, 3 * BK, T, X_STRIDE,
            A_STRIDE, K, BK, OFFSET, ROUND_FIRST,
        )  # fmt: skip
    for start in range(PRE * BK, K, BK):
        tile = weight_tile(w, row, start, K, BK)
        tile_up = None
        if GATED:
            tile_up = weight_tile(w_up, row, start, K, BK)
        a0, a1, a2, a3, u0, u1, u2, u3 = gemv_step(
            x, addend, norm_weight, rows, s0, s1, s2, s3, tile, tile_up, a0, a1, a2, a3, u0, u1, u2, u3, start, T,
            X_STRIDE, A_STRIDE, K, BK, OFFSET, ROUND_FIRST,
        )  # fmt: skip
    n = (pid * BN + tl.arange(0, BN))[:, None]
    dtype: tl.constexpr = x.dtype.element_ty
    gemv_store(a0, u0, bias, residual, out, n, rows, 0, R_STRIDE, N, ACT, LIMIT, ALPHA, GATED, dtype)
    if T > 1:
        gemv_store(a1, u1, bias, residual, out, n, rows, 1, R_STRIDE, N, ACT, LIMIT, ALPHA, GATED, dtype)
    if T > 2:
        gemv_store(a2, u2, bias, residual, out, n, rows, 2, R_STRIDE, N, ACT, LIMIT, ALPHA, GATED, dtype)
    if T > 3:
        gemv_store(a3, u3, bias, residual, out, n, rows, 3, R_STRIDE, N, ACT, LIMIT, ALPHA, GATED, dtype)


@triton.jit
def gemv_rows(
    x, w, bias, residual, addend, norm_weight, total, out, rows,
    X_STRIDE: tl.constexpr, R_STRIDE: tl.constexpr, A_STRIDE: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, STEPS: tl.constexpr, ACT: tl.constexpr, LIMIT: tl.constexpr,
    ALPHA: tl.constexpr, GATED: tl.constexpr, EPS: tl.constexpr, OFFSET: tl.constexpr, ROUND_FIRST: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """``gemv`` for one row that a program keeps in registers (BK >= K), normed once, for STEPS blocks of BN columns.
    The next block's weights are on their way while one is summed; the first ones are before the wait."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    pid = tl.program_id(0)
    w_up = w + tl.full((), N, tl.int64) * K
    first = pid * (BN * STEPS)
    row = weight_rows(first, N, K, BN)
    tile = weight_tile(w, row, 0, K, BK)
    tile_up = None
    if GATED:
        tile_up = weight_tile(w_up, row, 0, K, BK)
    if PDL:
        tl.extra.cuda.gdc_wait()
    dtype: tl.constexpr = x.dtype.element_ty
    v = row_piece(x, addend, rows, 0, 0, X_STRIDE, A_STRIDE, K, BK)
    if norm_weight is not None:
        store_piece(total, v, rows, 0, pid == 0, 0, K, BK)
        scale = tl.rsqrt(tl.sum(v * v, 1, keep_dims=True) / K + EPS)
        v = normed(v, scale, norm_weight, 0, dtype, K, BK, OFFSET, ROUND_FIRST)
    for step in tl.static_range(STEPS):
        acc = tile.to(tl.float32) * v
        acc_up = acc
        if GATED:
            acc_up = tile_up.to(tl.float32) * v
        if step + 1 < STEPS:
            row = weight_rows(first + (step + 1) * BN, N, K, BN)
            tile = weight_tile(w, row, 0, K, BK)
            if GATED:
                tile_up = weight_tile(w_up, row, 0, K, BK)
        n = (first + step * BN + tl.arange(0, BN))[:, None]
        gemv_store(acc, acc_up, bias, residual, out, n, rows, 0, R_STRIDE, N, ACT, LIMIT, ALPHA, GATED, dtype)
