"""Rows of a table by token, and rows of activations by index."""

import triton
import triton.language as tl


@triton.jit
def embedding(
    ids,  # int [rows]
    last_token,  # int32 [slots] or None: what ids below zero stand for
    table,  # [V, COLUMNS]
    out,  # [rows, COLUMNS]
    COLUMNS: tl.constexpr,
    SCALE: tl.constexpr,  # None, or a factor of the row once it has the result's type
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(ids + row).to(tl.int64)
    if last_token is not None:
        made = tl.load(last_token + tl.where(token < 0, -1 - token, 0), mask=token < 0, other=0).to(tl.int64)
        token = tl.where(token < 0, made, token)
    v = tl.load(table + token * COLUMNS + column, mask=column < COLUMNS).to(out.dtype.element_ty)
    if SCALE is not None:
        v = (v.to(tl.float32) * SCALE).to(out.dtype.element_ty)
    tl.store(out + row * COLUMNS + column, v, mask=column < COLUMNS)


@triton.jit
def gather_rows(
    x,
    index,  # int [rows]
    out,  # [rows, COLUMNS]
    STRIDE: tl.constexpr,  # of x's rows
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    source = tl.load(index + row).to(tl.int64)
    v = tl.load(x + source * STRIDE + column, mask=column < COLUMNS)
    tl.store(out + row * COLUMNS + column, v, mask=column < COLUMNS)
