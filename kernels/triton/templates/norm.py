"""RMS and layer norms over rows, with the residual add before them; optionally of gathered rows."""

import triton
import triton.language as tl


@triton.jit
def _rounded(x, dtype: tl.constexpr):
    return x.to(dtype).to(tl.float32)


@triton.jit
def _scaled(normal, w, b, weight, bias, dtype: tl.constexpr, OFFSET: tl.constexpr, ROUND_FIRST: tl.constexpr):
    """normal * (offset + weight) + bias; with ROUND_FIRST each step is rounded as its operands' types say."""
    if ROUND_FIRST:
        normal = _rounded(normal, dtype)
    if weight is not None:
        wt: tl.constexpr = weight.dtype.element_ty
        if OFFSET != 0.0:
            w = w + OFFSET
            if ROUND_FIRST:
                w = _rounded(w, wt)
        normal = normal * w
        if ROUND_FIRST and wt == dtype:
            normal = _rounded(normal, dtype)
    if bias is not None:
        normal = normal + b
    return normal


@triton.jit
def norm(
    x,  # [rows, COLUMNS], or what ``index`` picks rows from
    residual,  # like x, or None
    weight,  # [COLUMNS] or None
    bias,  # [COLUMNS] or None
    index,  # int [rows] or None: which rows of x and residual
    normed,  # [rows, COLUMNS]
    total,  # [rows, COLUMNS] or None: x + residual
    rows,
    X_STRIDE: tl.constexpr,
    RESIDUAL_STRIDE: tl.constexpr,
    COLUMNS: tl.constexpr,
    EPS: tl.constexpr,
    OFFSET: tl.constexpr,
    ROUND_FIRST: tl.constexpr,
    CENTRE: tl.constexpr,  # layer norm
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,  # all columns in one piece
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    dtype: tl.constexpr = normed.dtype.element_ty
    column = tl.arange(0, BLOCK)[None, :]
    inside = column < COLUMNS
    w = None
    b = None
    if weight is not None:
        w = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    if bias is not None:
        b = tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    mask = (row < rows) & inside
    source = row.to(tl.int64)
    if index is not None:
        source = tl.load(index + row, mask=row < rows, other=0).to(tl.int64)
    v = tl.load(x + source * X_STRIDE + column, mask=mask, other=0.0).to(tl.float32)
    if residual is not None:
        v += tl.load(residual + source * RESIDUAL_STRIDE + column, mask=mask, other=0.0).to(tl.float32)
        v = _rounded(v, dtype)
    place = row.to(tl.int64) * COLUMNS + column
    if total is not None:
        tl.store(total + place, v.to(dtype), mask=mask)
    if CENTRE:
        v -= tl.sum(v, 1, keep_dims=True) / COLUMNS
        v = tl.where(inside, v, 0.0)
    variance = tl.sum(v * v, 1, keep_dims=True) / COLUMNS
    normal = v * tl.rsqrt(variance + EPS)
    normal = _scaled(normal, w, b, weight, bias, dtype, OFFSET, ROUND_FIRST)
    tl.store(normed + place, normal.to(dtype), mask=mask)


@triton.jit
def _piece(
    x,
    residual,
    source,
    column,
    mask,
    dtype: tl.constexpr,
    X_STRIDE: tl.constexpr,
    RESIDUAL_STRIDE: tl.constexpr,
):
    v = tl.load(x + source * X_STRIDE + column, mask=mask, other=0.0).to(tl.float32)
    if residual is not None:
        v += tl.load(residual + source * RESIDUAL_STRIDE + column, mask=mask, other=0.0).to(tl.float32)
        v = _rounded(v, dtype)
    return v


@triton.jit
def norm_wide(
    x,
    residual,
    weight,
    bias,
    index,
    normed,
    total,
    rows,
    X_STRIDE: tl.constexpr,
    RESIDUAL_STRIDE: tl.constexpr,
    COLUMNS: tl.constexpr,
    EPS: tl.constexpr,
    OFFSET: tl.constexpr,
    ROUND_FIRST: tl.constexpr,
    CENTRE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """``norm`` for rows that do not fit in registers: one row a program, read once for each moment and to scale."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    dtype: tl.constexpr = normed.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    source = row
    if index is not None:
        source = tl.load(index + row).to(tl.int64)
    mean = 0.0
    if CENTRE:
        partial = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, COLUMNS, BLOCK):
            column = start + tl.arange(0, BLOCK)
            partial += _piece(x, residual, source, column, column < COLUMNS, dtype, X_STRIDE, RESIDUAL_STRIDE)
        mean = tl.sum(partial, 0) / COLUMNS
    partial = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, COLUMNS, BLOCK):
        column = start + tl.arange(0, BLOCK)
        v = _piece(x, residual, source, column, column < COLUMNS, dtype, X_STRIDE, RESIDUAL_STRIDE)
        v = tl.where(column < COLUMNS, v - mean, 0.0)
        partial += v * v
    scale = tl.rsqrt(tl.sum(partial, 0) / COLUMNS + EPS)
    for start in range(0, COLUMNS, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < COLUMNS
        v = _piece(x, residual, source, column, inside, dtype, X_STRIDE, RESIDUAL_STRIDE)
        if total is not None:
            tl.store(total + row * COLUMNS + column, v.to(dtype), mask=inside)
        w = None
        b = None
        if weight is not None:
            w = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
        if bias is not None:
            b = tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
        normal = _scaled((v - mean) * scale, w, b, weight, bias, dtype, OFFSET, ROUND_FIRST)
        tl.store(normed + row * COLUMNS + column, normal.to(dtype), mask=inside)
