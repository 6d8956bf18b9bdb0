"""Products of a few rows with a weight [N, K], K divided among a program's warps, with a norm before and the usual after.

Where a norm comes before, its rows are scaled after the product: x + addend, rounded, times the norm's weight goes into
the product, its squares are summed beside it, and the sums are multiplied by 1 / sqrt(mean square + eps). So rows are read
once, and the product waits for no reduction. What goes into the product is rounded once where the separate norm rounds
the scaled row, then its product with the weight: results differ by roundings of the operand.
"""

import triton
import triton.language as tl

from .linear import finish, weight_rows


@triton.jit
def norm_factor(norm_weight, column, K: tl.constexpr, OFFSET: tl.constexpr, ROUND_FIRST: tl.constexpr):
    """f32 offset + weight, rounded where the norm does, zeros past K."""
    g = tl.load(norm_weight + column, mask=column < K, other=0.0).to(tl.float32)
    if OFFSET != 0.0:
        g = g + OFFSET
        if ROUND_FIRST:
            g = g.to(norm_weight.dtype.element_ty).to(tl.float32)
    return g


@triton.jit
def columns_of(start, PARTS: tl.constexpr, BK: tl.constexpr):
    """[PARTS, 1, BK / PARTS] columns from ``start`` on."""
    width: tl.constexpr = BK // PARTS
    return start + tl.arange(0, PARTS)[:, None, None] * width + tl.arange(0, width)[None, None, :]


@triton.jit
def part_tile(w, row, start, PARTS: tl.constexpr, K: tl.constexpr, BK: tl.constexpr):
    """[PARTS, BN, BK / PARTS] of weights, zeros past K."""
    column = columns_of(start, PARTS, BK)
    at = w + row[None, :, None] * K + column
    if K % BK != 0:
        return tl.load(at, mask=column < K, other=0.0, eviction_policy="evict_first")
    else:
        return tl.load(at, eviction_policy="evict_first")


@triton.jit
def early(
    w, w_up, norm_weight, row, start, GATED: tl.constexpr, PARTS: tl.constexpr, K: tl.constexpr, BK: tl.constexpr,
    OFFSET: tl.constexpr, ROUND_FIRST: tl.constexpr,
):  # fmt: skip
    """What may be read before the wait: a tile of weights, of the gate's other half, of the norm's weight; else zeros."""
    tile = part_tile(w, row, start, PARTS, K, BK)
    up = tl.zeros((1, 1, 1), tl.float32)
    if GATED:
        up = part_tile(w_up, row, start, PARTS, K, BK)
    g = tl.zeros((1, 1, 1), tl.float32)
    if norm_weight is not None:
        g = norm_factor(norm_weight, columns_of(start, PARTS, BK), K, OFFSET, ROUND_FIRST)
    return tile, up, g


@triton.jit
def row_tile(
    x, rows, start, STRIDE: tl.constexpr, K: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """[PARTS, BM, BK / PARTS] of rows, zeros past their number and past K."""
    column = columns_of(start, PARTS, BK)
    m = tl.arange(0, BM)[None, :, None]
    inside = m < rows
    if K % BK != 0:
        inside = inside & (column < K)
    return tl.load(x + m * STRIDE + column, mask=inside, other=0.0)


@triton.jit
def late(
    x, addend, rows, start, X_STRIDE: tl.constexpr, A_STRIDE: tl.constexpr, K: tl.constexpr, BM: tl.constexpr,
    BK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Tiles of x and of the addend, or of x alone and a zero."""
    a = row_tile(x, rows, start, X_STRIDE, K, BM, BK, PARTS)
    b = tl.zeros((1, 1, 1), tl.float32)
    if addend is not None:
        b = row_tile(addend, rows, start, A_STRIDE, K, BM, BK, PARTS)
    return a, b


@triton.jit
def plus_product(acc, tile, a, BM: tl.constexpr, SWAP: tl.constexpr):
    """For one row by element, to be summed over columns at the end."""
    if BM == 1:
        return acc + tile.to(tl.float32) * a.to(tl.float32)
    elif SWAP:
        return tl.dot(tile, tl.permute(a, (0, 2, 1)), acc, input_precision="ieee")
    else:
        return tl.dot(a, tl.permute(tile, (0, 2, 1)), acc, input_precision="ieee")


@triton.jit
def skinny_step(
    total, rows, first, a, b, tile, tile_up, g, acc, up, squares, start,
    K: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, PARTS: tl.constexpr, SWAP: tl.constexpr, GATED: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Sums with one tile's products added, and its rows' squares."""
    if total is not None:
        column = columns_of(start, PARTS, BK)
        m = tl.arange(0, BM)[None, :, None]
        v = (a.to(tl.float32) + b.to(tl.float32)).to(a.dtype)
        tl.store(total + m * K + column, v, mask=(m < rows) & (column < K) & first)
        v = v.to(tl.float32)
        squares += tl.sum(tl.reshape(v * v, (PARTS, BM, BK // PARTS // 8, 8)), 3)
        if BM == 1:
            a = v * g
        else:
            a = (v * g).to(a.dtype)
    if PDL and BM > 1:
        # Opaque, or the compiler would bring each load through shared memory by itself, one behind the other.
        a = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [a], dtype=a.dtype, is_pure=False, pack=2)
    acc = plus_product(acc, tile, a, BM, SWAP)
    if GATED:
        up = plus_product(up, tile_up, a, BM, SWAP)
    return acc, up, squares


@triton.jit
def skinny(
    x,  # [rows, K]
    w,  # [N, K], or [2 * N, K] with GATED
    bias,  # [N] or [2 * N], or None
    residual,  # [rows, N] or None: added to the result
    addend,  # [rows, K] or None: added to x before the norm
    norm_weight,  # [K] or None, as addend and total
    total,  # [rows, K] or None: x + addend
    out,  # [rows, N]
    rows,  # at most BM
    X_STRIDE: tl.constexpr, R_STRIDE: tl.constexpr, A_STRIDE: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    BM: tl.constexpr,  # 8 or more for tensor cores, 1 to do without
    BN: tl.constexpr, BK: tl.constexpr,
    PARTS: tl.constexpr,  # of BK: as many as warps, each with a part's products of its own
    PRE: tl.constexpr,  # tiles loaded before the wait, at most 4 and those there are
    SWAP: tl.constexpr,  # weights as the first operand, of which there must be 16, not the rows; so with BM = 1
    ACT: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr, GATED: tl.constexpr, EPS: tl.constexpr,
    OFFSET: tl.constexpr, ROUND_FIRST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program for all rows and BN columns (of both halves of a gated weight)."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    pid = tl.program_id(0)
    row = weight_rows(pid * BN, N, K, BN)
    w_up = w + tl.full((), N, tl.int64) * K
    p0, p1, p2, p3 = None, None, None, None
    q0, q1, q2, q3 = None, None, None, None
    g0, g1, g2, g3 = None, None, None, None
    if PRE > 0:
        p0, q0, g0 = early(w, w_up, norm_weight, row, 0, GATED, PARTS, K, BK, OFFSET, ROUND_FIRST)
    if PRE > 1:
        p1, q1, g1 = early(w, w_up, norm_weight, row, BK, GATED, PARTS, K, BK, OFFSET, ROUND_FIRST)
    if PRE > 2:
        p2, q2, g2 = early(w, w_up, norm_weight, row, 2 * BK, GATED, PARTS, K, BK, OFFSET, ROUND_FIRST)
    if PRE > 3:
        p3, q3, g3 = early(w, w_up, norm_weight, row, 3 * BK, GATED, PARTS, K, BK, OFFSET, ROUND_FIRST)
    if PDL:
        tl.extra.cuda.gdc_wait()
    # All of these loads before the first product, so that they wait together.
    a0, a1, a2, a3 = None, None, None, None
    b0, b1, b2, b3 = None, None, None, None
    if PRE > 0:
        a0, b0 = late(x, addend, rows, 0, X_STRIDE, A_STRIDE, K, BM, BK, PARTS)
    if PRE > 1:
        a1, b1 = late(x, addend, rows, BK, X_STRIDE, A_STRIDE, K, BM, BK, PARTS)
    if PRE > 2:
        a2, b2 = late(x, addend, rows, 2 * BK, X_STRIDE, A_STRIDE, K, BM, BK, PARTS)
    if PRE > 3:
        a3, b3 = late(x, addend, rows, 3 * BK, X_STRIDE, A_STRIDE, K, BM, BK, PARTS)
    lines: tl.constexpr = BN if SWAP else BM
    across: tl.constexpr = BK // PARTS if BM == 1 else (BM if SWAP else BN)
    first = pid == 0
    acc = tl.zeros((PARTS, lines, across), tl.float32)
    up = tl.zeros((PARTS if GATED else 1, lines if GATED else 1, across if GATED else 1), tl.float32)
    squares = tl.zeros((PARTS, BM, BK // PARTS // 8), tl.float32)
    if PRE > 0:
        acc, up, squares = skinny_step(
            total, rows, first, a0, b0, p0, q0, g0, acc, up, squares, 0, K, BM, BK, PARTS, SWAP, GATED, PDL
        )  # fmt: skip
    if PRE > 1:
        acc, up, squares = skinny_step(
            total, rows, first, a1, b1, p1, q1, g1, acc, up, squares, BK, K, BM, BK, PARTS, SWAP, GATED, PDL
        )  # fmt: skip
    if PRE > 2:
        acc, up, squares = skinny_step(
            total, rows, first, a2, b2, p2, q2, g2, acc, up, squares, 2 * BK, K, BM, BK, PARTS, SWAP, GATED, PDL
        )  # fmt: skip
    if PRE > 3:
        acc, up, squares = skinny_step(
            total, rows, first, a3, b3, p3, q3, g3, acc, up, squares, 3 * BK, K, BM, BK, PARTS, SWAP, GATED, PDL
        )  # fmt: skip
    if PRE * BK < K:
        for start in tl.range(PRE * BK, K, BK):
            tile, tile_up, g = early(
                w, w_up, norm_weight, row, start, GATED, PARTS, K, BK, OFFSET, ROUND_FIRST
            )
            a, b = late(x, addend, rows, start, X_STRIDE, A_STRIDE, K, BM, BK, PARTS)
            acc, up, squares = skinny_step(
                total, rows, first, a, b, tile, tile_up, g, acc, up, squares, start, K, BM, BK, PARTS, SWAP, GATED, PDL
            )  # fmt: skip
    second = None
    if BM == 1:
        y = tl.sum(tl.sum(acc, 2), 0)[:, None]
        if GATED:
            second = tl.sum(tl.sum(up, 2), 0)[:, None]
    else:
        y = tl.sum(acc, 0)
        if GATED:
            second = tl.sum(up, 0)
    n = pid * BN + tl.arange(0, BN)
    m = tl.arange(0, BM)
    if SWAP:
        n, m = n[:, None], m[None, :]
    else:
        n, m = n[None, :], m[:, None]
    if norm_weight is not None:
        scale = tl.rsqrt(tl.sum(tl.sum(squares, 2), 0) / K + EPS)
        scale = scale[None, :] if SWAP else scale[:, None]
        y = y * scale
        if GATED:
            second = second * scale
    inside = (n < N) & (m < rows)
    dtype: tl.constexpr = x.dtype.element_ty
    at = m.to(tl.int64) * R_STRIDE + n
    y = finish(y, second, bias, residual, n, at, inside, N, ACT, LIMIT, ALPHA, dtype)
    tl.store(out + m.to(tl.int64) * N + n, y.to(out.dtype.element_ty), mask=inside)
