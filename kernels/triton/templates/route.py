"""Routing: the k largest of a row, alone or between a softmax and what makes weights of it, or behind the norm and the
product that give the logits.

One program takes ROWS rows. A value and its column are packed into one 64-bit integer whose order is that of the values,
lower columns first among equals, so one maximum finds both; NaN is largest, as in torch.
"""

import triton
import triton.language as tl

from .norm import _scaled


@triton.jit
def packed(x, column):
    """f32 values and their columns as integers in the order of the values; -0 equals 0."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    key = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (key.to(tl.int64) << 16) | (0xFFFF - column).to(tl.int64)


@triton.jit
def value_of(code):
    """The value that ``packed`` hid."""
    key = (code >> 16).to(tl.int32)
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def column_of(code):
    """The column that ``packed`` hid."""
    return 0xFFFF - (code & 0xFFFF)


@triton.jit
def largest(x, N: tl.constexpr, N2: tl.constexpr, TOP: tl.constexpr, TOP2: tl.constexpr, ROWS: tl.constexpr):
    """The TOP largest of each row of x [ROWS, N2] (columns from N on do not count): values, columns [ROWS, TOP2]."""
    column = tl.arange(0, N2)[None, :]
    place = tl.arange(0, TOP2)[None, :]
    code = tl.where(column < N, packed(x, column), -(1 << 62))
    found = tl.zeros((ROWS, TOP2), tl.int64)
    for j in tl.static_range(TOP):
        best = tl.max(code, 1)
        found = tl.where(place == j, best[:, None], found)
        code = tl.where(code == best[:, None], -(1 << 62), code)
    return value_of(found), column_of(found)


@triton.jit
def topk(
    x, values, indices, rows,
    STRIDE: tl.constexpr, N: tl.constexpr, N2: tl.constexpr, TOP: tl.constexpr, TOP2: tl.constexpr,
    ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """x [rows, N] gives values and indices [rows, TOP] in descending order."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, N2)[None, :]
    place = tl.arange(0, TOP2)[None, :]
    if PDL:
        tl.extra.cuda.gdc_wait()
    line = tl.load(x + row * STRIDE + column, mask=(row < rows) & (column < N), other=0.0).to(tl.float32)
    value, index = largest(line, N, N2, TOP, TOP2, ROWS)
    mask = (row < rows) & (place < TOP)
    tl.store(values + row * TOP + place, value.to(values.dtype.element_ty), mask=mask)
    tl.store(indices + row * TOP + place, index.to(indices.dtype.element_ty), mask=mask)


@triton.jit
def weighed(
    x, dtype: tl.constexpr, N: tl.constexpr, N2: tl.constexpr, TOP: tl.constexpr, TOP2: tl.constexpr,
    BEFORE: tl.constexpr, NORMALISE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Logits [ROWS, N2] of type ``dtype`` give f32 weights and columns [ROWS, TOP2]. BEFORE: softmax of all logits, then
    the largest, NORMALISE: divided by their sum; otherwise the softmax of the largest logits."""
    place = tl.arange(0, TOP2)[None, :]
    if BEFORE:
        x = tl.where(tl.arange(0, N2)[None, :] < N, x, float("-inf"))
        x = tl.exp(x - tl.max(x, 1)[:, None])
        x = x / tl.sum(x, 1)[:, None]
        value, index = largest(x, N, N2, TOP, TOP2, ROWS)
        value = tl.where(place < TOP, value, 0.0)
        if NORMALISE:
            value = value / tl.sum(value, 1)[:, None]
    else:
        value, index = largest(x, N, N2, TOP, TOP2, ROWS)
        value = tl.where(place < TOP, value, float("-inf"))
        value = tl.exp(value - tl.max(value, 1)[:, None])
        value = (value / tl.sum(value, 1)[:, None]).to(dtype).to(tl.float32)
    return value, index


@triton.jit
def route(
    logits, weights, ids, rows,
    STRIDE: tl.constexpr, N: tl.constexpr, N2: tl.constexpr, TOP: tl.constexpr, TOP2: tl.constexpr,
    BEFORE: tl.constexpr, NORMALISE: tl.constexpr, ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """logits [rows, N] give weights and ids [rows, TOP]."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, N2)[None, :]
    place = tl.arange(0, TOP2)[None, :]
    if PDL:
        tl.extra.cuda.gdc_wait()
    x = tl.load(logits + row * STRIDE + column, mask=(row < rows) & (column < N), other=0.0).to(tl.float32)
    value, index = weighed(x, logits.dtype.element_ty, N, N2, TOP, TOP2, BEFORE, NORMALISE, ROWS)
    mask = (row < rows) & (place < TOP)
    tl.store(weights + row * TOP + place, value.to(weights.dtype.element_ty), mask=mask)
    tl.store(ids + row * TOP + place, index.to(ids.dtype.element_ty), mask=mask)


@triton.jit
def norm_route(
    x, residual, norm_weight, weight, bias, normed, total, logits, weights, ids, counters,
    X_STRIDE: tl.constexpr, RESIDUAL_STRIDE: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
    EPS: tl.constexpr, OFFSET: tl.constexpr, ROUND_FIRST: tl.constexpr, N: tl.constexpr, N2: tl.constexpr,
    TOP: tl.constexpr, TOP2: tl.constexpr, BEFORE: tl.constexpr, NORMALISE: tl.constexpr, PART: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """For few rows: total = x + residual [rows, COLUMNS], its norm, the norm's product with weight [N, COLUMNS], and
    weights and ids [rows, TOP] from those logits. A program norms a row and computes PART logits of it; the one of a
    row that arrives last (counters [rows], left zero) routes it."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    dtype: tl.constexpr = normed.dtype.element_ty
    row = tl.program_id(1).to(tl.int64)
    column = tl.arange(0, BLOCK)[None, :]
    expert = tl.program_id(0) * PART + tl.arange(0, PART)[:, None]
    place = tl.arange(0, TOP2)[None, :]
    every = tl.arange(0, N2)[None, :]
    inside = column < COLUMNS
    w = tl.load(weight + expert * COLUMNS + column, mask=inside & (expert < N), other=0.0)
    scale = tl.load(norm_weight + column, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
    v = tl.load(x + row * X_STRIDE + column, mask=inside, other=0.0).to(tl.float32)
    v += tl.load(residual + row * RESIDUAL_STRIDE + column, mask=inside, other=0.0).to(tl.float32)
    v = v.to(dtype).to(tl.float32)
    normal = v * tl.rsqrt(tl.sum(v * v, 1, keep_dims=True) / COLUMNS + EPS)
    normal = _scaled(normal, scale, None, norm_weight, None, dtype, OFFSET, ROUND_FIRST).to(dtype)
    if tl.program_id(0) == 0:
        tl.store(total + row * COLUMNS + column, v.to(dtype), mask=inside)
        tl.store(normed + row * COLUMNS + column, normal, mask=inside)
    part = tl.sum(w.to(tl.float32) * normal.to(tl.float32), 1)[:, None]
    if bias is not None:
        part += tl.load(bias + expert, mask=expert < N, other=0.0).to(tl.float32)
    tl.store(logits + row * N + expert, part.to(dtype), mask=expert < N)
    tl.debug_barrier()  # all threads' logits are written before the one arrival is counted
    arrived = tl.atomic_add(counters + row, 1, sem="acq_rel", scope="gpu")
    if arrived == tl.num_programs(0) - 1:
        tl.store(counters + row, 0)
        tl.debug_barrier()
        # past the L1, which knows nothing of what other programs wrote
        found = tl.load(logits + row * N + every, mask=every < N, other=0.0, cache_modifier=".cg").to(
            tl.float32
        )
        value, index = weighed(found, dtype, N, N2, TOP, TOP2, BEFORE, NORMALISE, 1)
        tl.store(weights + row * TOP + place, value.to(weights.dtype.element_ty), mask=place < TOP)
        tl.store(ids + row * TOP + place, index.to(ids.dtype.element_ty), mask=place < TOP)
