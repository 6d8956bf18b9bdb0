"""Mixture of experts: gate and up, then down, over the experts that tokens chose, and the weighted sum.

Expert weights are [E, N, K]. A slot is token * TOP + place: one token with one of its experts. Few slots run as
matrix-vector products straight from the ids; more are put in blocks by expert (``align``). Roundings are the eager
module's: gate and up, each step of the activation, down, its product with the routing weight, and every addition of the
sum, whose order is that of ascending experts whichever way it was computed.
"""

import triton
import triton.language as tl

from .act import act
from .align import live_rows


@triton.jit
def rounded(x, DTYPE: tl.constexpr):
    """f32 values that DTYPE has."""
    return x.to(DTYPE).to(tl.float32)


@triton.jit
def gated(gate, up, ACT: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr, DTYPE: tl.constexpr):
    """act(gate) * up from f32 sums, each step rounded to DTYPE; gpt_oss clamps both and adds 1 to up."""
    gate = rounded(gate, DTYPE)
    up = rounded(up, DTYPE)
    if ACT == "gpt_oss":
        limit = rounded(tl.full((1, 1), LIMIT, tl.float32), DTYPE)
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit)
        slope = rounded(gate * ALPHA, DTYPE)
        share = rounded(1.0 / (1.0 + tl.exp(-slope)), DTYPE)
        return rounded(up + 1.0, DTYPE) * rounded(gate * share, DTYPE)
    else:
        return rounded(act(gate, ACT), DTYPE) * up


@triton.jit
def order_of(ids, token, TOP: tl.constexpr, TOP2: tl.constexpr):
    """For each place of a token, its turn in the order of ascending experts: [TOP2]."""
    place = tl.arange(0, TOP2)
    expert = tl.load(ids + token * TOP + place, mask=place < TOP, other=0x7FFFFFFF).to(tl.int32)
    first = expert[None, :] < expert[:, None]
    tie = (expert[None, :] == expert[:, None]) & (place[None, :] < place[:, None])
    return tl.sum((first | tie).to(tl.int32), 1)


@triton.jit
def gate_up_gemv(
    x, ids, weight, bias, h, meta, rows,
    STRIDE: tl.constexpr, K: tl.constexpr, F: tl.constexpr, TOP: tl.constexpr, STEP: tl.constexpr, UP: tl.constexpr,
    ACT: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr, BIAS: tl.constexpr, COUNT: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Few slots: h [rows * TOP, F]. A program for BN columns of a slot, slots fastest, so that slots of one expert find
    its rows in the cache. Gate rows are n * STEP, up rows n * STEP + UP."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    slot = tl.program_id(0)
    n = tl.program_id(1) * BN + tl.arange(0, BN)[:, None]
    if PDL:
        tl.extra.cuda.gdc_wait()
    # Asking for the expert in the condition has its load run beside that of the count, not behind it.
    expert = tl.load(ids + slot).to(tl.int64)
    if (slot < live_rows(meta, rows, COUNT) * TOP) & (expert >= 0):
        line = weight + expert * (2 * F * K) + n * (STEP * K)
        source = x + (slot // TOP).to(tl.int64) * STRIDE
        gate = tl.zeros((BN, BK), tl.float32)
        up = tl.zeros((BN, BK), tl.float32)
        for start in tl.static_range(0, K, BK):
            k = start + tl.arange(0, BK)[None, :]
            if F % BN == 0 and K % BK == 0:
                a = tl.load(line + k)
                b = tl.load(line + UP * K + k)
                v = tl.load(source + k)
            else:
                a = tl.load(line + k, mask=(n < F) & (k < K), other=0.0)
                b = tl.load(line + UP * K + k, mask=(n < F) & (k < K), other=0.0)
                v = tl.load(source + k, mask=k < K, other=0.0)
            gate += a.to(tl.float32) * v.to(tl.float32)
            up += b.to(tl.float32) * v.to(tl.float32)
        gates = tl.sum(gate, 1)[:, None]
        ups = tl.sum(up, 1)[:, None]
        if BIAS:
            given = bias + expert * (2 * F) + n * STEP
            gates += tl.load(given, mask=n < F, other=0.0).to(tl.float32)
            ups += tl.load(given + UP, mask=n < F, other=0.0).to(tl.float32)
        result = gated(gates, ups, ACT, LIMIT, ALPHA, h.dtype.element_ty)
        tl.store(h + slot.to(tl.int64) * F + n, result.to(h.dtype.element_ty), mask=n < F)


@triton.jit
def down_gemv(
    h, ids, weights, weight, bias, out, meta, rows,
    H: tl.constexpr, F: tl.constexpr, TOP: tl.constexpr, TOP2: tl.constexpr, BIAS: tl.constexpr, COUNT: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Few tokens: out [rows, H], the weighted sum in it. A program for BN columns of a token, tokens fastest."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    token = tl.program_id(0)
    column = tl.program_id(1) * BN + tl.arange(0, BN)
    place = tl.arange(0, TOP2)
    n = column[None, :, None]
    total = tl.zeros((BN,), tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
    expert = tl.load(ids + token * TOP + place, mask=place < TOP, other=0).to(tl.int64)
    if (token < live_rows(meta, rows, COUNT)) & (tl.min(expert, 0) >= 0):
        factor = tl.load(weights + token * TOP + place, mask=place < TOP, other=0.0).to(tl.float32)
        line = weight + expert[:, None, None] * (H * F) + n * F
        source = h + (token.to(tl.int64) * TOP + place)[:, None, None] * F
        sums = tl.zeros((TOP2, BN, BK), tl.float32)
        for start in tl.static_range(0, F, BK):
            k = start + tl.arange(0, BK)[None, None, :]
            if H % BN == 0 and F % BK == 0 and TOP == TOP2:
                w = tl.load(line + k)
                v = tl.load(source + k)
            else:
                known = (place < TOP)[:, None, None] & (k < F)
                w = tl.load(line + k, mask=known & (n < H), other=0.0)
                v = tl.load(source + k, mask=known, other=0.0)
            sums += w.to(tl.float32) * v.to(tl.float32)
        each = tl.sum(sums, 2)
        if BIAS:
            mask = (place < TOP)[:, None] & (column < H)[None, :]
            each += tl.load(bias + expert[:, None] * H + column[None, :], mask=mask, other=0.0).to(tl.float32)
        each = rounded(rounded(each, out.dtype.element_ty) * factor[:, None], out.dtype.element_ty)
        turn = order_of(ids, token, TOP, TOP2)[:, None]
        for j in tl.static_range(TOP):
            total = rounded(total + tl.sum(tl.where(turn == j, each, 0.0), 0), out.dtype.element_ty)
    tl.store(out + token.to(tl.int64) * H + column, total.to(out.dtype.element_ty), mask=column < H)


@triton.jit
def grouped_gate_up(
    x, slots, owners, used, weight, bias, h,
    STRIDE: tl.constexpr, K: tl.constexpr, F: tl.constexpr, TOP: tl.constexpr, STEP: tl.constexpr, UP: tl.constexpr,
    ACT: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr, BIAS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Blocks of slots: h [rows * TOP, F] at each slot's own row. A program for BN columns of a block."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    block = tl.program_id(1)
    if PDL:
        tl.extra.cuda.gdc_wait()
    expert = tl.load(owners + block).to(
        tl.int64
    )  # asked for in the condition too, so both are loaded at once
    if (block < tl.load(used)) & (expert >= 0):
        slot = tl.load(slots + block * BM + tl.arange(0, BM))
        real = (slot >= 0)[:, None]
        k = tl.arange(0, BK)
        row = (tl.maximum(slot, 0) // TOP).to(tl.int64)
        source = x + row[:, None] * STRIDE + k[None, :]
        line = weight + expert * (2 * F * K) + n[None, :] * (STEP * K) + k[:, None]
        gate = tl.zeros((BM, BN), tl.float32)
        up = tl.zeros((BM, BN), tl.float32)
        for start in range(0, K, BK):
            if F % BN == 0 and K % BK == 0:
                v = tl.load(source + start, mask=real, other=0.0)
                a = tl.load(line + start)
                b = tl.load(line + start + UP * K)
            else:
                known = ((start + k) < K)[:, None] & (n < F)[None, :]
                v = tl.load(source + start, mask=real & ((start + k) < K)[None, :], other=0.0)
                a = tl.load(line + start, mask=known, other=0.0)
                b = tl.load(line + start + UP * K, mask=known, other=0.0)
            gate = tl.dot(v, a, gate, input_precision="ieee")
            up = tl.dot(v, b, up, input_precision="ieee")
        if BIAS:
            given = bias + expert * (2 * F) + n * STEP
            gate += tl.load(given, mask=n < F, other=0.0).to(tl.float32)[None, :]
            up += tl.load(given + UP, mask=n < F, other=0.0).to(tl.float32)[None, :]
        result = gated(gate, up, ACT, LIMIT, ALPHA, h.dtype.element_ty)
        target = h + slot.to(tl.int64)[:, None] * F + n[None, :]
        tl.store(target, result.to(h.dtype.element_ty), mask=real & (n < F)[None, :])


@triton.jit
def grouped_down(
    h, slots, owners, used, weights, weight, bias, y,
    H: tl.constexpr, F: tl.constexpr, BIAS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Blocks of slots: y [rows * TOP, H], each row times its routing weight. A program for BN columns of a block."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    block = tl.program_id(1)
    if PDL:
        tl.extra.cuda.gdc_wait()
    expert = tl.load(owners + block).to(
        tl.int64
    )  # asked for in the condition too, so both are loaded at once
    if (block < tl.load(used)) & (expert >= 0):
        slot = tl.load(slots + block * BM + tl.arange(0, BM))
        real = slot >= 0
        k = tl.arange(0, BK)
        source = h + tl.maximum(slot, 0).to(tl.int64)[:, None] * F + k[None, :]
        line = weight + expert * (H * F) + n[None, :] * F + k[:, None]
        total = tl.zeros((BM, BN), tl.float32)
        for start in range(0, F, BK):
            if H % BN == 0 and F % BK == 0:
                v = tl.load(source + start, mask=real[:, None], other=0.0)
                w = tl.load(line + start)
            else:
                known = ((start + k) < F)[:, None] & (n < H)[None, :]
                v = tl.load(source + start, mask=real[:, None] & ((start + k) < F)[None, :], other=0.0)
                w = tl.load(line + start, mask=known, other=0.0)
            total = tl.dot(v, w, total, input_precision="ieee")
        if BIAS:
            total += tl.load(bias + expert * H + n, mask=n < H, other=0.0).to(tl.float32)[None, :]
        factor = tl.load(weights + tl.maximum(slot, 0), mask=real, other=0.0).to(tl.float32)
        result = rounded(total, y.dtype.element_ty) * factor[:, None]
        target = y + slot.to(tl.int64)[:, None] * H + n[None, :]
        tl.store(target, result.to(y.dtype.element_ty), mask=real[:, None] & (n < H)[None, :])


@triton.jit
def combine(
    y, ids, out, meta, rows,
    H: tl.constexpr, TOP: tl.constexpr, TOP2: tl.constexpr, COUNT: tl.constexpr, BN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out [rows, H]: the TOP rows of y [rows * TOP, H] of each token added up; padded rows are zero."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    token = tl.program_id(0)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    place = tl.arange(0, TOP2)
    total = tl.zeros((BN,), tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
    if token < live_rows(meta, rows, COUNT):
        turn = order_of(ids, token, TOP, TOP2)
        first = y + token.to(tl.int64) * TOP * H + n
        for j in tl.static_range(TOP):
            at = tl.sum(tl.where((turn == j) & (place < TOP), place, 0))
            found = tl.load(first + at * H, mask=n < H, other=0.0).to(tl.float32)
            total = rounded(total + found, out.dtype.element_ty)
    tl.store(out + token.to(tl.int64) * H + n, total.to(out.dtype.element_ty), mask=n < H)
