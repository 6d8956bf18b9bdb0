"""Decode attention straight from the packed product of q, k and v: one new token a sequence, rotated and stored here.

The new key and value join the softmax from registers, so that no program waits for another's write: the cache is read
up to the position before.
"""

import triton
import triton.language as tl

from .attention import FLOOR, LOG2E, block_offset, capped, finish, load_tile, tile_blocks, tile_offset
from .rope import BLOCK, norm_factor, normed, squares, turned


@triton.jit
def partners(column, ROT: tl.constexpr, INTERLEAVED: tl.constexpr):
    """The columns that ``column`` turns with: its pair's other member; past ROT itself."""
    if INTERLEAVED:
        return tl.where(column < ROT, column ^ 1, column)
    else:
        HALF: tl.constexpr = ROT // 2
        other = tl.where(column < HALF, column + HALF, tl.where(column < ROT, column - HALF, column))
        # runs of columns stay together, which the compiler cannot see
        return tl.max_contiguous(tl.multiple_of(other, HALF & -HALF), HALF & -HALF)


@triton.jit
def angles(row, column, mask, ROT: tl.constexpr, INTERLEAVED: tl.constexpr, HALF_WIDTH: tl.constexpr):
    """The rotary table's row once for every row of ``mask`` [rows, DP], so that it has the heads' layout; 0 past ROT."""
    if HALF_WIDTH:
        if INTERLEAVED:
            entry = column // 2
        else:
            HALF: tl.constexpr = ROT // 2
            entry = tl.max_contiguous(tl.multiple_of(column % HALF, HALF & -HALF), HALF & -HALF)
    else:
        entry = column
    at = row + entry[None, :] + tl.zeros((mask.shape[0], 1), tl.int32)
    return tl.load(at, mask=mask & (column < ROT)[None, :], other=0.0)


@triton.jit
def load_rows(pointer, offset, inside, D: tl.constexpr, DP: tl.constexpr):
    """[1, rows, DP] at pointer + offset [rows], zeros where not ``inside``, in the layout of products over heads."""
    column = tl.arange(0, DP)
    at = pointer + offset[None, :, None] + column[None, None, :]
    return tl.load(at, mask=inside[None, :, None] & (column < D)[None, None, :], other=0.0)


@triton.jit
def soften(scores, inside, top, total, SCALE: tl.constexpr, SOFTCAP: tl.constexpr):
    """Weights of a tile's products [rows, keys], what older weights shrink by, and maximum and sum brought forward."""
    factor: tl.constexpr = 1.0 if SOFTCAP > 0 else SCALE * LOG2E
    scores = tl.where(inside[None, :], capped(scores, SCALE, SOFTCAP), float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, 1) * factor)
    p = tl.exp2(scores * factor - new_top[:, None])
    alpha = tl.exp2(top - new_top)
    return p, alpha, new_top, total * alpha + tl.sum(p, 1)


@triton.jit
def turned_heads(
    x, y, factor, other_factor, c, s, which, column, D: tl.constexpr, ROT: tl.constexpr, ROUND: tl.constexpr,
    INTERLEAVED: tl.constexpr, NORM: tl.constexpr, EPS: tl.constexpr, ROUND_FIRST: tl.constexpr,
):  # fmt: skip
    """Heads x [rows, DP], whose pairs' other members are y, normed and turned by the angles c and s [rows, DP]."""
    if NORM:
        scale = tl.rsqrt(squares(x) / D + EPS)
        x = normed(x, scale, factor[None, :], which, ROUND_FIRST)
        if ROT > 0:
            y = normed(y, scale, other_factor[None, :], which, ROUND_FIRST)
    if ROT > 0:
        ahead = (column % 2 == 0) if INTERLEAVED else (column < ROT // 2)
        s = tl.where(ahead[None, :], -s.to(tl.float32), s.to(tl.float32))
        return tl.where((column < ROT)[None, :], turned(x, y, c, s, 1.0, ROUND), x)
    else:
        return x


@triton.jit
def qkv_attention(
    cache, qkv, out, cos, sin, q_norm, k_norm, partial, stats, counters, sinks, seq_lens, table, meta,
    X_STRIDE: tl.constexpr, OUT_STRIDE: tl.constexpr, COS_STRIDE: tl.constexpr, SIN_STRIDE: tl.constexpr,
    H: tl.constexpr, HK: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, M: tl.constexpr, D: tl.constexpr,
    DP: tl.constexpr, ROT: tl.constexpr, INTERLEAVED: tl.constexpr, HALF_WIDTH: tl.constexpr, ROUND: tl.constexpr,
    Q_NORM: tl.constexpr, K_NORM: tl.constexpr, EPS: tl.constexpr, OFFSET: tl.constexpr, ROUND_FIRST: tl.constexpr,
    SCALE: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr, TILE: tl.constexpr,
    SPLITS: tl.constexpr, CHUNK: tl.constexpr, LEAST: tl.constexpr, SINGLE: tl.constexpr, DOT: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Row s of qkv [S, H + 2 * HK, D] is the token of sequence s. Grid: (H / G, SPLITS, S).

    Each program takes G query heads of one key head, and a run of at least LEAST tiles of the cached keys; the last
    that has any (the only one, if there are none) takes the new key too, and stores it. Parts are added up as in
    ``decode``. SINGLE: one sequence. DOT: products by tl.dot, with M >= 16 rows; without it by multiplying and adding
    in registers, M being GP, which waits for less where few heads share a key.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    group, split, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    column = tl.arange(0, DP)
    rows = tl.arange(0, GP)
    one = tl.arange(0, 1)
    other = column
    if ROT > 0:
        other = partners(column, ROT, INTERLEAVED)
    q_factor, q_other, k_factor, k_other = column, column, column, column
    if Q_NORM:
        q_factor = norm_factor(q_norm, column, D, OFFSET, ROUND_FIRST)
        q_other = norm_factor(q_norm, other, D, OFFSET, ROUND_FIRST)
    if K_NORM:
        k_factor = norm_factor(k_norm, column, D, OFFSET, ROUND_FIRST)
        k_other = norm_factor(k_norm, other, D, OFFSET, ROUND_FIRST)
    if PDL:
        tl.extra.cuda.gdc_wait()
    # All that is known without another load is loaded at once.
    length = tl.load(seq_lens + sequence)
    blocks = table
    if not SINGLE:
        blocks += sequence.to(tl.int64) * tl.load(meta + 3)
    kv_head = group * G // (H // HK)
    token = qkv + sequence.to(tl.int64) * X_STRIDE
    q_row = token + (group * G + rows) * D
    k_row = token + (H + kv_head) * D
    q_mask = (rows < G)[:, None] & (column < D)[None, :]
    new_mask = (column < D)[None, :]
    x = tl.load(q_row[:, None] + column[None, :], mask=q_mask, other=0.0)
    new_key = tl.load(k_row + column[None, :], mask=new_mask, other=0.0)
    new_value = tl.load(k_row + HK * D + column[None, :], mask=new_mask, other=0.0)
    y, key_y, c, s, key_c, key_s = x, new_key, column, column, column, column
    if ROT > 0:
        y = tl.load(q_row[:, None] + other[None, :], mask=q_mask, other=0.0)
        key_y = tl.load(k_row + other[None, :], mask=new_mask, other=0.0)
        cos += sequence.to(tl.int64) * COS_STRIDE
        sin += sequence.to(tl.int64) * SIN_STRIDE
        c = angles(cos, column, q_mask, ROT, INTERLEAVED, HALF_WIDTH)
        s = angles(sin, column, q_mask, ROT, INTERLEAVED, HALF_WIDTH)
        key_c = angles(cos, column, new_mask, ROT, INTERLEAVED, HALF_WIDTH)
        key_s = angles(sin, column, new_mask, ROT, INTERLEAVED, HALF_WIDTH)
    position = length - 1
    low = tl.maximum(length - WINDOW, 0) if WINDOW > 0 else 0
    first = low // TILE
    count = tl.cdiv(position, TILE) - first
    each = tl.maximum(tl.cdiv(count, SPLITS), LEAST)
    start = (first + split * each) * TILE
    end = tl.minimum(start + each * TILE, position)
    STRIDE: tl.constexpr = 2 * HK * BLOCK * D
    keys = cache + kv_head * (BLOCK * D)
    values = keys + HK * BLOCK * D
    key = start + tl.arange(0, TILE)
    inside = (key >= low) & (key < end)
    b0, b1, b2, b3 = tile_blocks(blocks, start, end, TILE)
    n0, n1, n2, n3 = tile_blocks(blocks, start + TILE, end, TILE)
    home = tl.load(blocks + position // BLOCK, mask=length > 0, other=-1)
    b0, b1 = block_offset(b0, STRIDE), block_offset(b1, STRIDE)
    b2, b3 = block_offset(b2, STRIDE), block_offset(b3, STRIDE)
    if not DOT:
        # on their way while q and the new key are turned
        at = tile_offset(start, b0, b1, b2, b3, D, TILE)
        k = load_rows(keys, at, inside, D, DP)
        v = load_rows(values, at, inside, D, DP)
        b0, b1 = block_offset(n0, STRIDE), block_offset(n1, STRIDE)
        b2, b3 = block_offset(n2, STRIDE), block_offset(n3, STRIDE)
        n0, n1, n2, n3 = tile_blocks(blocks, start + 2 * TILE, end, TILE)
    query = turned_heads(
        x, y, q_factor, q_other, c, s, rows < G, column, D, ROT, ROUND, INTERLEAVED, Q_NORM, EPS, ROUND_FIRST
    )
    new_key = turned_heads(
        new_key, key_y, k_factor, k_other, key_c, key_s, one < 1, column, D, ROT, ROUND, INTERLEAVED, K_NORM, EPS,
        ROUND_FIRST,
    )  # fmt: skip
    factor: tl.constexpr = 1.0 if SOFTCAP > 0 else SCALE * LOG2E
    owner = (split + 1) * each >= count
    score = capped(tl.sum(query.to(tl.float32) * new_key.to(tl.float32), 1), SCALE, SOFTCAP)
    if M > GP:
        # tl.dot needs more rows: the same ones again
        query = tl.reshape(tl.broadcast_to(query[None, :, :], (M // GP, GP, DP)), (M, DP))
        score = tl.reshape(tl.broadcast_to(score[None, :], (M // GP, GP)), (M,))
    top = tl.where(owner, score * factor, FLOOR)
    total = tl.where(owner, tl.full((M,), 1.0, tl.float32), 0.0)
    acc = tl.where(owner, new_value.to(tl.float32), 0.0) + tl.zeros((M, DP), tl.float32)
    if DOT:
        precision: tl.constexpr = "ieee" if query.dtype == tl.float32 else "tf32"
        for tile in tl.range(start, end, TILE):
            at = tile_offset(tile, b0, b1, b2, b3, D, TILE)
            b0, b1 = block_offset(n0, STRIDE), block_offset(n1, STRIDE)
            b2, b3 = block_offset(n2, STRIDE), block_offset(n3, STRIDE)
            n0, n1, n2, n3 = tile_blocks(blocks, tile + 2 * TILE, end, TILE)
            key = tile + tl.arange(0, TILE)
            inside = (key >= low) & (key < end)
            k = load_tile(keys, at, inside, True, D, DP)
            v = load_tile(values, at, inside, True, D, DP)
            scores = tl.dot(query, tl.trans(k), input_precision=precision)
            p, alpha, top, total = soften(scores, inside, top, total, SCALE, SOFTCAP)
            acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision=precision)
    else:
        for tile in tl.range(start, end, TILE):
            at = tile_offset(tile + TILE, b0, b1, b2, b3, D, TILE)
            b0, b1 = block_offset(n0, STRIDE), block_offset(n1, STRIDE)
            b2, b3 = block_offset(n2, STRIDE), block_offset(n3, STRIDE)
            n0, n1, n2, n3 = tile_blocks(blocks, tile + 3 * TILE, end, TILE)
            key = tile + TILE + tl.arange(0, TILE)
            next_inside = (key >= low) & (key < end)
            next_k = load_rows(keys, at, next_inside, D, DP)
            next_v = load_rows(values, at, next_inside, D, DP)
            scores = tl.sum(query[:, None, :].to(tl.float32) * k.to(tl.float32), 2)
            p, alpha, top, total = soften(scores, inside, top, total, SCALE, SOFTCAP)
            acc = acc * alpha[:, None] + tl.sum(p[:, :, None] * v.to(tl.float32), 1)
            k, v, inside = next_k, next_v, next_inside
    # Not earlier: loads would be put off until the branch is taken, hence until the length is there.
    if (length <= 0) | ((split > 0) & (split * each >= count)):
        return
    writes = owner & (home >= 0) & (group * G % (H // HK) == 0)
    target = cache + block_offset(home, STRIDE) + kv_head * (BLOCK * D) + position % BLOCK * D
    tl.store(target + column[None, :], new_key, mask=new_mask & writes)
    tl.store(target + HK * BLOCK * D + column[None, :], new_value, mask=new_mask & writes)
    finish(
        out, partial, stats, counters, sinks, acc, top, total, group, split, sequence, each >= count,
        tl.cdiv(count, each), OUT_STRIDE, H, G, GP, M, D,
        DP, SPLITS, CHUNK, SINKS, True,
    )  # fmt: skip
