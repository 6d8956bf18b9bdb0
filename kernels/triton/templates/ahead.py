"""Weights asked for before they are needed."""

import triton
import triton.language as tl


@triton.jit
def warm(w, row, start, K: tl.constexpr, COLUMNS: tl.constexpr, PER_LINE: tl.constexpr):
    """Ask for COLUMNS columns of weights from ``start`` on to be brought into the L2 cache, a line at a time."""
    column = tl.minimum(start + tl.arange(0, COLUMNS // PER_LINE) * PER_LINE, K - 1)
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [w + row[:, None] * K + column[None, :]], dtype=tl.int32,
        is_pure=False, pack=1,
    )  # fmt: skip
