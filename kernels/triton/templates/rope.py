"""Rotary tables, rotation, and the kernel between the qkv product and attention.

The cache of a layer is [blocks, 2, HK, 32, D]: keys, then values. Block tables have meta[3] columns a sequence.
"""

import triton
import triton.language as tl

BLOCK = tl.constexpr(32)  # tokens of a cache block


@triton.jit
def sequence_of(token, query_start, count, STEPS: tl.constexpr):
    """The sequence that owns ``token``: the last s < count with query_start[s] <= token. 2**STEPS >= count."""
    low = tl.zeros_like(token)
    high = low + count
    for _ in tl.static_range(STEPS):
        middle = (low + high) // 2
        below = tl.load(query_start + middle) <= token
        low = tl.where(below, middle, low)
        high = tl.where(below, high, middle)
    return low


@triton.jit
def cache_row(
    token,
    real,
    positions,
    query_start,
    table,
    meta,
    STEPS: tl.constexpr,
    STRIDE: tl.constexpr,
    D: tl.constexpr,
):
    """Elements from the cache's start to token's row of key head 0, and whether the token has one."""
    position = tl.load(positions + token, mask=real, other=0)
    sequence = token if STEPS < 0 else sequence_of(token, query_start, tl.load(meta + 1), STEPS)
    entry = sequence.to(tl.int64) * tl.load(meta + 3) + position // BLOCK
    block = tl.load(table + entry, mask=real, other=-1)
    return block.to(tl.int64) * STRIDE + position % BLOCK * D, real & (block >= 0)


@triton.jit
def rotary_table(
    positions, inv_freq, cos, sin, COUNT, SCALING: tl.constexpr, HALF: tl.constexpr, WIDTH: tl.constexpr,
    WIDTH_P: tl.constexpr, REPEAT: tl.constexpr, BT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """cos and sin [COUNT, WIDTH] of position * frequency. Grid: (ceil(COUNT / BT),)."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    column = tl.arange(0, WIDTH_P)
    source = column // 2 if REPEAT else column % HALF
    freq = tl.load(inv_freq + source, mask=column < WIDTH, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
    token = tl.program_id(0) * BT + tl.arange(0, BT)
    position = tl.load(positions + token, mask=token < COUNT, other=0).to(tl.float32)
    angle = position[:, None] * freq[None, :]
    at = token.to(tl.int64)[:, None] * WIDTH + column[None, :]
    mask = (token < COUNT)[:, None] & (column < WIDTH)[None, :]
    tl.store(cos + at, (tl.cos(angle) * SCALING).to(cos.dtype.element_ty), mask=mask)
    tl.store(sin + at, (tl.sin(angle) * SCALING).to(sin.dtype.element_ty), mask=mask)


@triton.jit
def turned(x, y, c, s, SIGN: tl.constexpr, ROUND: tl.constexpr):
    """x * c + SIGN * y * s in x's dtype; with ROUND each product is rounded to it first."""
    first = x.to(tl.float32) * c.to(tl.float32)
    second = y.to(tl.float32) * s.to(tl.float32)
    if ROUND:
        first = first.to(x.dtype).to(tl.float32)
        second = second.to(x.dtype).to(tl.float32)
    return (first + SIGN * second).to(x.dtype)


@triton.jit
def load_pairs(row, mask, ROT: tl.constexpr, HALF_P: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Both members of the pairs that turn, [rows, HALF_P] each; ``row`` and ``mask`` are [rows]."""
    if INTERLEAVED:
        column = tl.arange(0, 2 * HALF_P)
        both = tl.load(
            row[:, None] + column[None, :], mask=mask[:, None] & (column < ROT)[None, :], other=0.0
        )
        return tl.split(tl.reshape(both, (row.shape[0], HALF_P, 2)))
    else:
        column = tl.arange(0, HALF_P)
        inside = mask[:, None] & (column < ROT // 2)[None, :]
        at = row[:, None] + column[None, :]
        return tl.load(at, mask=inside, other=0.0), tl.load(at + ROT // 2, mask=inside, other=0.0)


@triton.jit
def store_pairs(row, first, second, mask, ROT: tl.constexpr, HALF_P: tl.constexpr, INTERLEAVED: tl.constexpr):
    """The inverse of ``load_pairs``."""
    if INTERLEAVED:
        column = tl.arange(0, 2 * HALF_P)
        both = tl.reshape(tl.join(first, second), (row.shape[0], 2 * HALF_P))
        tl.store(row[:, None] + column[None, :], both, mask=mask[:, None] & (column < ROT)[None, :])
    else:
        column = tl.arange(0, HALF_P)
        inside = mask[:, None] & (column < ROT // 2)[None, :]
        at = row[:, None] + column[None, :]
        tl.store(at, first, mask=inside)
        tl.store(at + ROT // 2, second, mask=inside)


@triton.jit
def table_pairs(
    row, mask, ROT: tl.constexpr, HALF_P: tl.constexpr, INTERLEAVED: tl.constexpr, HALF_WIDTH: tl.constexpr
):
    """The table's entries for both members of each pair."""
    if HALF_WIDTH:
        column = tl.arange(0, HALF_P)
        once = tl.load(
            row[:, None] + column[None, :], mask=mask[:, None] & (column < ROT // 2)[None, :], other=0.0
        )
        return once, once
    else:
        return load_pairs(row, mask, ROT, HALF_P, INTERLEAVED)


@triton.jit
def rope(
    x, out, cos, sin, COUNT, X_STRIDE: tl.constexpr, OUT_STRIDE: tl.constexpr, COS_STRIDE: tl.constexpr,
    SIN_STRIDE: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, ROT: tl.constexpr, HALF_P: tl.constexpr,
    REST_P: tl.constexpr, INTERLEAVED: tl.constexpr, HALF_WIDTH: tl.constexpr, ROUND: tl.constexpr,
    BT: tl.constexpr, BH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """x [COUNT, HEADS, D], its first ROT columns turned. Grid: (ceil(COUNT / BT), ceil(HEADS / BH))."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    rows = tl.arange(0, BT * BH)
    token = tl.program_id(0) * BT + rows // BH
    head = tl.program_id(1) * BH + rows % BH
    mask = (token < COUNT) & (head < HEADS)
    source = x + token.to(tl.int64) * X_STRIDE + head * D
    target = out + token.to(tl.int64) * OUT_STRIDE + head * D
    a, b = load_pairs(source, mask, ROT, HALF_P, INTERLEAVED)
    ca, cb = table_pairs(cos + token.to(tl.int64) * COS_STRIDE, mask, ROT, HALF_P, INTERLEAVED, HALF_WIDTH)
    sa, sb = table_pairs(sin + token.to(tl.int64) * SIN_STRIDE, mask, ROT, HALF_P, INTERLEAVED, HALF_WIDTH)
    store_pairs(
        target,
        turned(a, b, ca, sa, -1.0, ROUND),
        turned(b, a, cb, sb, 1.0, ROUND),
        mask,
        ROT,
        HALF_P,
        INTERLEAVED,
    )
    if D > ROT:
        column = ROT + tl.arange(0, REST_P)
        inside = mask[:, None] & (column < D)[None, :]
        rest = tl.load(source[:, None] + column[None, :], mask=inside)
        tl.store(target[:, None] + column[None, :], rest, mask=inside)


@triton.jit
def kv_write(
    cache, k, v, positions, query_start, table, meta, COUNT, K_STRIDE: tl.constexpr, V_STRIDE: tl.constexpr,
    HK: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, STEPS: tl.constexpr, BT: tl.constexpr, BH: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Rows of k and v [COUNT, HK, D] to their sequences' blocks. Grid: (ceil(COUNT / BT), ceil(HK / BH)).

    STEPS: as for ``sequence_of``; -1 where token t is sequence t's.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    rows = tl.arange(0, BT * BH)
    token = tl.program_id(0) * BT + rows // BH
    head = tl.program_id(1) * BH + rows % BH
    real = token < tl.minimum(COUNT, tl.load(meta))
    place, has = cache_row(token, real, positions, query_start, table, meta, STEPS, 2 * HK * BLOCK * D, D)
    column = tl.arange(0, DP)
    mask = (has & (head < HK))[:, None] & (column < D)[None, :]
    key = tl.load((k + token.to(tl.int64) * K_STRIDE + head * D)[:, None] + column[None, :], mask=mask)
    value = tl.load((v + token.to(tl.int64) * V_STRIDE + head * D)[:, None] + column[None, :], mask=mask)
    target = (cache + place + head * (BLOCK * D))[:, None] + column[None, :]
    tl.store(target, key, mask=mask)
    tl.store(target + HK * BLOCK * D, value, mask=mask)


@triton.jit
def norm_factor(weight, column, WIDTH: tl.constexpr, OFFSET: tl.constexpr, ROUND_FIRST: tl.constexpr):
    """What a normalised column is multiplied with, in f32; the sum is rounded where the reference does."""
    w = tl.load(weight + column, mask=column < WIDTH, other=0.0)
    if OFFSET == 0.0:
        return w.to(tl.float32)
    if ROUND_FIRST:
        return (w.to(tl.float32) + OFFSET).to(w.dtype).to(tl.float32)
    return w.to(tl.float32) + OFFSET


@triton.jit
def head_factor(
    q_norm, k_norm, is_q, is_k, column, D: tl.constexpr, OFFSET: tl.constexpr, ROUND_FIRST: tl.constexpr,
    Q_NORM: tl.constexpr, K_NORM: tl.constexpr,
):  # fmt: skip
    """[rows, columns]: the factor of each row's kind of head; 1 for heads that have no norm."""
    one = tl.full((is_q.shape[0], column.shape[0]), 1.0, tl.float32)
    if Q_NORM:
        one = tl.where(is_q[:, None], norm_factor(q_norm, column, D, OFFSET, ROUND_FIRST)[None, :], one)
    if K_NORM:
        one = tl.where(is_k[:, None], norm_factor(k_norm, column, D, OFFSET, ROUND_FIRST)[None, :], one)
    return one


@triton.jit
def normed(x, scale, factor, which, ROUND_FIRST: tl.constexpr):
    """x * scale * factor for the rows in ``which``, rounded as rms_norm is; the others pass."""
    normal = x.to(tl.float32) * scale[:, None]
    if ROUND_FIRST:
        normal = normal.to(x.dtype).to(tl.float32)
    return tl.where(which[:, None], (normal * factor).to(x.dtype), x)


@triton.jit
def squares(x):
    """Sum over the columns of x squared, in f32."""
    wide = x.to(tl.float32)
    return tl.sum(wide * wide, 1)


@triton.jit
def qkv_rope_write(
    cache, qkv, out, cos, sin, q_norm, k_norm, positions, query_start, table, meta, COUNT, X_STRIDE: tl.constexpr,
    OUT_STRIDE: tl.constexpr, COS_STRIDE: tl.constexpr, SIN_STRIDE: tl.constexpr, H: tl.constexpr, HK: tl.constexpr,
    D: tl.constexpr, ROT: tl.constexpr, HALF_P: tl.constexpr, REST_P: tl.constexpr, INTERLEAVED: tl.constexpr,
    HALF_WIDTH: tl.constexpr, ROUND: tl.constexpr, Q_NORM: tl.constexpr, K_NORM: tl.constexpr, EPS: tl.constexpr,
    OFFSET: tl.constexpr, ROUND_FIRST: tl.constexpr, STEPS: tl.constexpr, BT: tl.constexpr, BH: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Rows [H + 2 * HK, D] of qkv: q heads normed and turned to ``out``, keys likewise and values to the cache.

    Grid: (ceil(COUNT / BT), ceil((H + 2 * HK) / BH)). ROT is 0 without cos and sin. STEPS: see ``kv_write``.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    rows = tl.arange(0, BT * BH)
    token = tl.program_id(0) * BT + rows // BH
    head = tl.program_id(1) * BH + rows % BH
    is_q = head < H
    is_k = (head >= H) & (head < H + HK)
    rest_column = ROT + tl.arange(0, REST_P)
    half = tl.arange(0, HALF_P)
    first_column = half * 2 if INTERLEAVED else half
    second_column = half * 2 + 1 if INTERLEAVED else half + ROT // 2
    if Q_NORM or K_NORM:
        if ROT > 0:
            fa = head_factor(q_norm, k_norm, is_q, is_k, first_column, D, OFFSET, ROUND_FIRST, Q_NORM, K_NORM)
            fb = head_factor(
                q_norm, k_norm, is_q, is_k, second_column, D, OFFSET, ROUND_FIRST, Q_NORM, K_NORM
            )
        if D > ROT:
            fr = head_factor(q_norm, k_norm, is_q, is_k, rest_column, D, OFFSET, ROUND_FIRST, Q_NORM, K_NORM)
    if PDL:
        tl.extra.cuda.gdc_wait()
    mask = (token < COUNT) & (head < H + 2 * HK)
    source = qkv + token.to(tl.int64) * X_STRIDE + head * D
    rest_mask = (rest_column < D)[None, :]
    if ROT > 0:
        a, b = load_pairs(source, mask, ROT, HALF_P, INTERLEAVED)
        turns = mask & (head < H + HK)
        ca, cb = table_pairs(
            cos + token.to(tl.int64) * COS_STRIDE, turns, ROT, HALF_P, INTERLEAVED, HALF_WIDTH
        )
        sa, sb = table_pairs(
            sin + token.to(tl.int64) * SIN_STRIDE, turns, ROT, HALF_P, INTERLEAVED, HALF_WIDTH
        )
    if D > ROT:
        rest = tl.load(source[:, None] + rest_column[None, :], mask=mask[:, None] & rest_mask, other=0.0)
    real = token < tl.minimum(COUNT, tl.load(meta))
    place, has = cache_row(token, real, positions, query_start, table, meta, STEPS, 2 * HK * BLOCK * D, D)
    if Q_NORM or K_NORM:
        total = tl.zeros((BT * BH,), tl.float32)
        if ROT > 0:
            total += squares(a) + squares(b)
        if D > ROT:
            total += squares(rest)
        scale = tl.rsqrt(total / D + EPS)
        which = (is_q & Q_NORM) | (is_k & K_NORM)
        if ROT > 0:
            a = normed(a, scale, fa, which, ROUND_FIRST)
            b = normed(b, scale, fb, which, ROUND_FIRST)
        if D > ROT:
            rest = normed(rest, scale, fr, which, ROUND_FIRST)
    q_row = out + token.to(tl.int64) * OUT_STRIDE + head * D
    kv_row = cache + place + (head - H) * (BLOCK * D)
    q_mask = mask & is_q
    kv_mask = mask & has & (head >= H)
    if ROT > 0:
        ra = tl.where(turns[:, None], turned(a, b, ca, sa, -1.0, ROUND), a)
        rb = tl.where(turns[:, None], turned(b, a, cb, sb, 1.0, ROUND), b)
        store_pairs(q_row, ra, rb, q_mask, ROT, HALF_P, INTERLEAVED)
        store_pairs(kv_row, ra, rb, kv_mask, ROT, HALF_P, INTERLEAVED)
    if D > ROT:
        tl.store(q_row[:, None] + rest_column[None, :], rest, mask=q_mask[:, None] & rest_mask)
        tl.store(kv_row[:, None] + rest_column[None, :], rest, mask=kv_mask[:, None] & rest_mask)
