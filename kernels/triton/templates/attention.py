"""Attention over the paged cache [blocks, 2, HK, 32, D] and over dense keys: tiles of keys, softmax in base 2.

A program takes G query heads that share one key head. Scores stay in log2 units: softmax's running maximum and sum
are f32. Rows that see nothing yet have the maximum FLOOR, which is finite, so that no NaN arises.
"""

import triton
import triton.language as tl

from .rope import BLOCK

LOG2E = tl.constexpr(1.4426950408889634)
FLOOR = tl.constexpr(-1.0e30)


@triton.jit
def block_offset(block, STRIDE: tl.constexpr):
    """Elements from the cache's start to ``block``; block 0 stands in for a freed one (-1), whose keys are masked."""
    return tl.maximum(block, 0).to(tl.int64) * STRIDE


@triton.jit
def tile_blocks(table, tile, high, BN: tl.constexpr):
    """The blocks of the tile of BN keys from ``tile`` on; a tile has one, two or four."""
    b0 = tl.load(table + tile // BLOCK, mask=tile < high, other=0)
    b1, b2, b3 = b0, b0, b0
    if BN > 32:
        b1 = tl.load(table + tile // BLOCK + 1, mask=tile + 32 < high, other=0)
    if BN > 64:
        b2 = tl.load(table + tile // BLOCK + 2, mask=tile + 64 < high, other=0)
        b3 = tl.load(table + tile // BLOCK + 3, mask=tile + 96 < high, other=0)
    return b0, b1, b2, b3


@triton.jit
def tile_offset(tile, b0, b1, b2, b3, D: tl.constexpr, BN: tl.constexpr):
    """Offsets [BN] of the rows of the tile from key ``tile`` on, of whose blocks the offsets are given."""
    rows = tl.arange(0, BN)
    block = tl.zeros((BN,), tl.int64) + b0
    if BN > 32:
        block = tl.where(rows >= 32, b1, block)
    if BN > 64:
        block = tl.where(rows >= 64, b2, block)
        block = tl.where(rows >= 96, b3, block)
    if BN < 32:
        rows += tile
    # blocks too are multiples of D; without the hint, loads of a tile of two blocks are not seen to be aligned
    return tl.multiple_of(block + rows % BLOCK * D, D & -D)


@triton.jit
def load_tile(pointer, offset, inside, MASK: tl.constexpr, D: tl.constexpr, DP: tl.constexpr):
    """[rows, DP] at pointer + offset [rows]; zeros outside of ``inside`` (with MASK) and past D."""
    column = tl.arange(0, DP)
    at = pointer + offset[:, None] + column[None, :]
    if MASK and DP != D:
        return tl.load(at, mask=inside[:, None] & (column < D)[None, :], other=0.0)
    elif MASK:
        return tl.load(at, mask=inside[:, None], other=0.0)
    elif DP != D:
        return tl.load(at, mask=(column < D)[None, :], other=0.0)
    else:
        return tl.load(at)


@triton.jit
def capped(s, SCALE: tl.constexpr, SOFTCAP: tl.constexpr):
    """Products of queries and keys as they are; with SOFTCAP as capped scores in log2 units."""
    if SOFTCAP > 0:
        return SOFTCAP * LOG2E * (1.0 - 2.0 / (tl.exp2(s * (2.0 * SCALE * LOG2E / SOFTCAP)) + 1.0))
    else:
        return s


@triton.jit
def attend(
    q, keys, values, table, acc, top, total, position, start, end, low, high, K_STRIDE: tl.constexpr,
    V_STRIDE: tl.constexpr, BN: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr,
    SCALE: tl.constexpr, SOFTCAP: tl.constexpr, WINDOW: tl.constexpr, CAUSAL: tl.constexpr, PAGED: tl.constexpr,
    MASK: tl.constexpr,
):  # fmt: skip
    """q [M, DP] of tokens at ``position`` [M] sees the keys from ``start`` (a multiple of BN) to ``end``.

    Gives acc [M, DVP], top [M], total [M] brought forward. Without MASK every row sees every key of the tiles.
    [low, high): keys that may be read at all. K_STRIDE and V_STRIDE are a block's elements in a paged cache (``table``
    is the sequence's row), otherwise a key's.
    """
    precision: tl.constexpr = "ieee" if q.dtype == tl.float32 else "tf32"
    factor: tl.constexpr = 1.0 if SOFTCAP > 0 else SCALE * LOG2E
    rows = tl.arange(0, BN)
    # Blocks are looked up two tiles ahead, so that loads of keys wait for no other load. They are carried as loaded and
    # become offsets one tile later: Triton does not pipeline a loop that hands a carried value on unchanged.
    if PAGED:
        b0, b1, b2, b3 = tile_blocks(table, start, high, BN)
        n0, n1, n2, n3 = tile_blocks(table, start + BN, high, BN)
        b0, b1 = block_offset(b0, K_STRIDE), block_offset(b1, K_STRIDE)
        b2, b3 = block_offset(b2, K_STRIDE), block_offset(b3, K_STRIDE)
    for tile in tl.range(start, end, BN):
        key = tile + rows
        if PAGED:
            k_at = tile_offset(tile, b0, b1, b2, b3, D, BN)
            v_at = k_at
            b0, b1 = block_offset(n0, K_STRIDE), block_offset(n1, K_STRIDE)
            b2, b3 = block_offset(n2, K_STRIDE), block_offset(n3, K_STRIDE)
            n0, n1, n2, n3 = tile_blocks(table, tile + 2 * BN, high, BN)
        else:
            k_at = key.to(tl.int64) * K_STRIDE
            v_at = key.to(tl.int64) * V_STRIDE
        inside = (key >= low) & (key < high)
        k = load_tile(keys, k_at, inside, MASK, D, DP)
        s = tl.dot(q, tl.trans(k), input_precision=precision)
        s = capped(s, SCALE, SOFTCAP)
        if MASK:
            visible = inside[None, :]
            if CAUSAL:
                visible = visible & (key[None, :] <= position[:, None])
            if WINDOW > 0:
                visible = visible & (key[None, :] > position[:, None] - WINDOW)
                if not CAUSAL:
                    visible = visible & (key[None, :] < position[:, None] + WINDOW)
            s = tl.where(visible, s, float("-inf"))
        new_top = tl.maximum(top, tl.max(s, 1) * factor)
        p = tl.exp2(s * factor - new_top[:, None])
        alpha = tl.exp2(top - new_top)
        total = total * alpha + tl.sum(p, 1)
        acc = acc * alpha[:, None]
        v = load_tile(values, v_at, inside, MASK, DV, DVP)
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision=precision)
        top = new_top
    return acc, top, total


@triton.jit
def first_total(sinks, head, ok, M: tl.constexpr, SINKS: tl.constexpr):
    """Maximum and sum before any key: those of the sink, where there is one."""
    if SINKS:
        return tl.load(sinks + head, mask=ok, other=0.0).to(tl.float32) * LOG2E, tl.full(
            (M,), 1.0, tl.float32
        )
    else:
        return tl.full((M,), FLOOR, tl.float32), tl.zeros((M,), tl.float32)


@triton.jit
def combine(
    out, partial, stats, sinks, head, index, active, G: tl.constexpr, GP: tl.constexpr, D: tl.constexpr,
    DP: tl.constexpr, SPLITS: tl.constexpr, CHUNK: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """G heads' rows of one output row from their splits' parts, added in the order of splits, CHUNK of them at once.

    ``head`` is the first of the heads, ``index`` the number of (sequence, head) among all.
    """
    own = tl.arange(0, GP)
    column = tl.arange(0, DP)
    mask = (own < G)[:, None] & (column < D)[None, :]
    best, total = first_total(sinks, head + own, own < G, GP, SINKS)
    acc = tl.zeros((GP, DP), tl.float32)
    for base in tl.range(0, active, CHUNK, num_stages=1):
        split = base + tl.arange(0, CHUNK)
        live = (own < G)[:, None] & (split < active)[None, :]
        row = (index + own).to(tl.int64)[:, None] * SPLITS + split[None, :]
        top = tl.load(stats + row * 2, mask=live, other=FLOOR, cache_modifier=".cg")
        part = tl.load(stats + row * 2 + 1, mask=live, other=0.0, cache_modifier=".cg")
        parts = tl.load(
            partial + row[:, :, None] * D + column[None, None, :],
            mask=live[:, :, None] & (column < D)[None, None, :], other=0.0, cache_modifier=".cg",
        )  # fmt: skip
        new = tl.maximum(best, tl.max(top, 1))
        weight = tl.where(live, tl.exp2(top - new[:, None]), 0.0)
        scale = tl.exp2(best - new)
        total = total * scale + tl.sum(weight * part, 1)
        acc = acc * scale[:, None] + tl.sum(weight[:, :, None] * parts, 1)
        best = new
    result = acc / tl.where(own < G, total, 1.0)[:, None]
    tl.store(out + (head + own)[:, None] * D + column[None, :], result.to(out.dtype.element_ty), mask=mask)


@triton.jit
def finish(
    out, partial, stats, counters, sinks, acc, top, total, group, split, sequence, alone, active,
    OUT_STRIDE: tl.constexpr, H: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, M: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    SPLITS: tl.constexpr, CHUNK: tl.constexpr, SINKS: tl.constexpr, FUSED: tl.constexpr,
):  # fmt: skip
    """A split's acc [M, DP], top [M], total [M], of which G rows count: to out if it is ``alone``, else as its part.

    With FUSED the program that arrives last adds the parts of all ``active`` splits up.
    """
    rows = tl.arange(0, M)
    column = tl.arange(0, DP)
    head = group * G + rows
    mask = (rows < G)[:, None] & (column < D)[None, :]
    result = out + sequence.to(tl.int64) * OUT_STRIDE
    if alone:
        if SINKS:
            sink = tl.load(sinks + head, mask=rows < G, other=0.0).to(tl.float32) * LOG2E
            best = tl.maximum(top, sink)
            scale = tl.exp2(top - best)
            total = total * scale + tl.exp2(sink - best)
            acc = acc * scale[:, None]
        acc = acc / total[:, None]
        tl.store(result + head[:, None] * D + column[None, :], acc.to(out.dtype.element_ty), mask=mask)
    else:
        if SPLITS > 1:
            part = (sequence * H + head).to(tl.int64) * SPLITS + split
            tl.store(partial + part[:, None] * D + column[None, :], acc, mask=mask)
            tl.store(stats + part * 2, top, mask=rows < G)
            tl.store(stats + part * 2 + 1, total, mask=rows < G)
            if FUSED:
                counter = counters + sequence * (H // G) + group
                tl.debug_barrier()  # all threads' parts are written before the one arrival is counted
                arrived = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
                if arrived == active - 1:
                    tl.store(counter, 0)
                    tl.debug_barrier()
                    combine(
                        result, partial, stats, sinks, group * G, sequence * H + group * G, active, G, GP, D, DP, SPLITS,
                        CHUNK, SINKS,
                    )  # fmt: skip


@triton.jit
def active_splits(
    length, TILE: tl.constexpr, SPLITS: tl.constexpr, LEAST: tl.constexpr, WINDOW: tl.constexpr
):
    """(first tile, tiles a split, splits that have any) of a context of ``length``."""
    first = tl.maximum(length - WINDOW, 0) // TILE if WINDOW > 0 else 0
    end = tl.cdiv(length, TILE)
    each = tl.maximum(tl.cdiv(end - first, SPLITS), LEAST)
    return first, each, tl.cdiv(end - first, each)


@triton.jit
def decode(
    q, cache, out, partial, stats, counters, sinks, seq_lens, table, meta, Q_STRIDE: tl.constexpr,
    OUT_STRIDE: tl.constexpr, H: tl.constexpr, HK: tl.constexpr, G: tl.constexpr, GP: tl.constexpr,
    M: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, TILE: tl.constexpr, SPLITS: tl.constexpr,
    CHUNK: tl.constexpr, LEAST: tl.constexpr, SCALE: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr, FUSED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One query a sequence: row s of q [S, H, D] is sequence s's. Grid: (H / G, SPLITS, S).

    Each program takes a run of at least LEAST key tiles. A context that one split holds is finished by it; otherwise parts go to
    partial [S, H, SPLITS, D] and stats [S, H, SPLITS, 2] (maximum, sum), both f32, and with FUSED the program that
    arrives last (counters [S, H / G], left zero) adds them up; without it ``decode_reduce`` does.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    group, split, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(seq_lens + sequence)
    rows = tl.arange(0, M)
    column = tl.arange(0, DP)
    head = group * G + rows
    mask = (rows < G)[:, None] & (column < D)[None, :]
    # loaded before the length is known, to wait once for both
    query = tl.load(
        q + sequence.to(tl.int64) * Q_STRIDE + head[:, None] * D + column[None, :], mask=mask, other=0.0
    )
    blocks = table + sequence.to(tl.int64) * tl.load(meta + 3)
    first, each, active = active_splits(length, TILE, SPLITS, LEAST, WINDOW)
    if split >= active:
        return
    keys = cache + group * G // (H // HK) * (BLOCK * D)
    start = first + split * each
    low = tl.maximum(length - WINDOW, 0) if WINDOW > 0 else 0
    acc, top, total = attend(
        query, keys, keys + HK * BLOCK * D, blocks, tl.zeros((M, DP), tl.float32), tl.full((M,), FLOOR, tl.float32),
        tl.zeros((M,), tl.float32), tl.zeros((M,), tl.int32), start * TILE, tl.minimum((start + each) * TILE, length),
        low, length, 2 * HK * BLOCK * D, 0, TILE, D, DP, D, DP, SCALE, SOFTCAP, 0, False, True, True,
    )  # fmt: skip
    finish(
        out, partial, stats, counters, sinks, acc, top, total, group, split, sequence, active == 1, active,
        OUT_STRIDE, H, G, GP, M, D,
        DP, SPLITS, CHUNK, SINKS, FUSED,
    )  # fmt: skip


@triton.jit
def decode_reduce(
    out, partial, stats, sinks, seq_lens, OUT_STRIDE: tl.constexpr, H: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    TILE: tl.constexpr, SPLITS: tl.constexpr, CHUNK: tl.constexpr, LEAST: tl.constexpr, WINDOW: tl.constexpr,
    SINKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """What ``decode`` without FUSED left open: contexts of more than one split. Grid: (H, S)."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    head, sequence = tl.program_id(0), tl.program_id(1)
    _, _, active = active_splits(tl.load(seq_lens + sequence), TILE, SPLITS, LEAST, WINDOW)
    if active > 1:
        combine(
            out + sequence.to(tl.int64) * OUT_STRIDE, partial, stats, sinks, head, sequence * H + head, active, 1, 1, D, DP,
            SPLITS, CHUNK, SINKS,
        )  # fmt: skip


@triton.jit
def attend_rows(
    q, out, keys, values, table, sinks, row, head, position, ok, base, last, high, Q_STRIDE: tl.constexpr,
    OUT_STRIDE: tl.constexpr, K_STRIDE: tl.constexpr, V_STRIDE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    D: tl.constexpr, DP: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr, SCALE: tl.constexpr, WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr, CAUSAL: tl.constexpr, SINKS: tl.constexpr, PAGED: tl.constexpr,
):  # fmt: skip
    """BM rows (token ``row``, ``head``, ``position``, all [BM]; those not ``ok`` are idle) of q to out.

    ``base`` and ``last`` are the smallest and largest position of the rows, ``high`` the number of keys.
    """
    column = tl.arange(0, DP)
    query = tl.load(
        q + row.to(tl.int64)[:, None] * Q_STRIDE + head[:, None] * D + column[None, :],
        mask=ok[:, None] & (column < D)[None, :], other=0.0,
    )  # fmt: skip
    top, total = first_total(sinks, head, ok, BM, SINKS)
    acc = tl.zeros((BM, DVP), tl.float32)
    low = 0
    if CAUSAL:
        high = tl.minimum(high, last + 1)
        open_end = (base + 1) // BN * BN  # tiles before it hold no key after any row's own
    else:
        high = tl.minimum(high, last + WINDOW) if WINDOW > 0 else high
        open_end = tl.minimum(high, base + WINDOW) // BN * BN if WINDOW > 0 else high // BN * BN
    open_start = 0
    if WINDOW > 0:
        low = tl.maximum(base - WINDOW + 1, 0)
        begin = low // BN * BN
        open_start = tl.maximum(tl.cdiv(tl.maximum(last - WINDOW + 1, 0), BN) * BN, begin)
        open_end = tl.maximum(open_end, begin)
        open_start = tl.minimum(open_start, open_end)
        acc, top, total = attend(
            query, keys, values, table, acc, top, total, position, begin, open_start, low, high, K_STRIDE, V_STRIDE,
            BN, D, DP, DV, DVP, SCALE, SOFTCAP, WINDOW, CAUSAL, PAGED, True,
        )  # fmt: skip
    acc, top, total = attend(
        query, keys, values, table, acc, top, total, position, open_start, open_end, low, high, K_STRIDE, V_STRIDE,
        BN, D, DP, DV, DVP, SCALE, SOFTCAP, WINDOW, CAUSAL, PAGED, False,
    )  # fmt: skip
    acc, top, total = attend(
        query, keys, values, table, acc, top, total, position, open_end, high, low, high, K_STRIDE, V_STRIDE, BN, D, DP,
        DV, DVP, SCALE, SOFTCAP, WINDOW, CAUSAL, PAGED, True,
    )  # fmt: skip
    acc = acc * tl.where(total > 0, 1.0 / total, 0.0)[:, None]
    columns = tl.arange(0, DVP)
    tl.store(
        out + row.to(tl.int64)[:, None] * OUT_STRIDE + head[:, None] * DV + columns[None, :],
        acc.to(out.dtype.element_ty), mask=ok[:, None] & (columns < DV)[None, :],
    )  # fmt: skip


@triton.jit
def prefill(
    q, cache, out, sinks, query_start, seq_lens, table, meta, Q_STRIDE: tl.constexpr, OUT_STRIDE: tl.constexpr,
    H: tl.constexpr, HK: tl.constexpr, G: tl.constexpr, BQ: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    D: tl.constexpr, DP: tl.constexpr, SCALE: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr, STEPS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Queries of any number a sequence, causal. Grid: (H / G, at least floor(T / BQ) + S).

    A program has BQ queries of one sequence times G heads, as BM >= BQ * G rows. Sequence s owns the tiles from
    floor(query_start[s] / BQ) + s on, which are enough for it whatever its start; the last tiles run first, as they see
    the longest contexts. 2**STEPS is at least the number of sequences.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    group = tl.program_id(0)
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    sequence = tile * 0
    bound = tl.load(meta + 1)
    for _ in tl.static_range(STEPS):
        middle = (sequence + bound) // 2
        below = tl.load(query_start + middle) // BQ + middle <= tile
        sequence = tl.where(below, middle, sequence)
        bound = tl.where(below, bound, middle)
    start = tl.load(query_start + sequence)
    count = tl.load(query_start + sequence + 1) - start
    query = (tile - start // BQ - sequence) * BQ
    if query >= count:
        return
    length = tl.load(seq_lens + sequence)
    rows = tl.arange(0, BM)
    own = query + rows // G
    ok = (rows < BQ * G) & (own < count)
    base = length - count + query
    keys = cache + group * G // (H // HK) * (BLOCK * D)
    attend_rows(
        q, out, keys, keys + HK * BLOCK * D, table + sequence.to(tl.int64) * tl.load(meta + 3), sinks, start + own,
        group * G + rows % G, length - count + own, ok, base, length - count + tl.minimum(query + BQ, count) - 1, length,
        Q_STRIDE, OUT_STRIDE, 2 * HK * BLOCK * D, 0, BM, BN, D, DP, D, DP, SCALE, WINDOW, SOFTCAP, True, SINKS, True,
    )  # fmt: skip


@triton.jit
def dense(
    q, k, v, out, sinks, QUERIES, KEYS, Q_STRIDE: tl.constexpr, K_STRIDE: tl.constexpr, V_STRIDE: tl.constexpr,
    OUT_STRIDE: tl.constexpr, H: tl.constexpr, HK: tl.constexpr, G: tl.constexpr, BQ: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr, SCALE: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, CAUSAL: tl.constexpr, SINKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One sequence of KEYS keys, of which the last QUERIES ask. Grid: (H / G, ceil(QUERIES / BQ))."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    group = tl.program_id(0)
    query = (tl.num_programs(1) - 1 - tl.program_id(1)) * BQ
    rows = tl.arange(0, BM)
    own = query + rows // G
    before = KEYS - QUERIES
    kv_head = group * G // (H // HK)
    attend_rows(
        q, out, k + kv_head * D, v + kv_head * DV, k, sinks, own, group * G + rows % G, before + own,
        (rows < BQ * G) & (own < QUERIES), before + query, before + tl.minimum(query + BQ, QUERIES) - 1, KEYS, Q_STRIDE,
        OUT_STRIDE, K_STRIDE, V_STRIDE, BM, BN, D, DP, DV, DVP, SCALE, WINDOW, SOFTCAP, CAUSAL, SINKS, False,
    )  # fmt: skip
