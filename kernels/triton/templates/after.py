"""What comes after a product that a library made: bias, activation, gate, residual; also a gated activation alone."""

import triton
import triton.language as tl

from .linear import finish


@triton.jit
def after(
    y,  # [rows, N]
    up,  # like y, or None
    bias,  # [N], [2 * N] with up, or None
    residual,  # [rows, N] or None
    out,  # [rows, N]
    Y_STRIDE: tl.constexpr, UP_STRIDE: tl.constexpr, R_STRIDE: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr,
    ACT: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program for a row's BLOCK columns. Where anything is rounded on the way, it is to out's dtype."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    n = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, :]
    inside = n < N
    value = tl.load(y + row * Y_STRIDE + n, mask=inside, other=0.0).to(tl.float32)
    second = None
    if up is not None:
        second = tl.load(up + row * UP_STRIDE + n, mask=inside, other=0.0).to(tl.float32)
    dtype: tl.constexpr = out.dtype.element_ty
    value = finish(value, second, bias, residual, n, row * R_STRIDE + n, inside, N, ACT, LIMIT, ALPHA, dtype)
    tl.store(out + row * N + n, value.to(dtype), mask=inside)
