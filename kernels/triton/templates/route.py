"""Routing: the k largest of a row, alone or between a softmax and what makes weights of it.

One program takes ROWS rows. A value and its column are packed into one 64-bit integer whose order is that of the values,
lower columns first among equals, so one maximum finds both; NaN is largest, as in torch.
"""

import triton
import triton.language as tl


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
def route(
    logits, weights, ids, rows,
    STRIDE: tl.constexpr, N: tl.constexpr, N2: tl.constexpr, TOP: tl.constexpr, TOP2: tl.constexpr,
    BEFORE: tl.constexpr, NORMALISE: tl.constexpr, ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """logits [rows, N] give weights and ids [rows, TOP]. BEFORE: softmax of all logits, then the largest, NORMALISE:
    divided by their sum; otherwise the softmax of the largest logits."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, N2)[None, :]
    place = tl.arange(0, TOP2)[None, :]
    if PDL:
        tl.extra.cuda.gdc_wait()
    x = tl.load(logits + row * STRIDE + column, mask=(row < rows) & (column < N), other=0.0).to(tl.float32)
    if BEFORE:
        x = tl.where(column < N, x, float("-inf"))
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
        value = (value / tl.sum(value, 1)[:, None]).to(logits.dtype.element_ty)
    mask = (row < rows) & (place < TOP)
    tl.store(weights + row * TOP + place, value.to(weights.dtype.element_ty), mask=mask)
    tl.store(ids + row * TOP + place, index.to(ids.dtype.element_ty), mask=mask)
