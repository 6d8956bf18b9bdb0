"""Experts around grouped products that want rows sorted by expert, dense: bring rows there, and add results up.

A place is a row of the sorted order, which ``align`` gives with blocks of one slot: ``slots`` [places] by expert,
``owners`` their experts, ``used`` [1] how many there are.
"""

import triton
import triton.language as tl

from .align import live_rows
from .experts import order_of, rounded


@triton.jit
def sort_rows(
    x, slots, owners, used, rows, places, offsets,
    STRIDE: tl.constexpr, H: tl.constexpr, TOP: tl.constexpr, EXPERTS: tl.constexpr, E2: tl.constexpr,
    BN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """rows [places, H]: x of each place's token; places [slots] of each slot; offsets [EXPERTS + 1]: each
    expert's first place, then their number. A program for BN columns of a place. E2: above EXPERTS."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    place = tl.program_id(0)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    expert = tl.arange(0, E2)
    if PDL:
        tl.extra.cuda.gdc_wait()
    number = tl.load(used)
    if place < number:
        slot = tl.load(slots + place)
        row = tl.load(x + (slot // TOP).to(tl.int64) * STRIDE + n, mask=n < H)
        tl.store(rows + place.to(tl.int64) * H + n, row, mask=n < H)
        if tl.program_id(1) == 0:
            tl.store(places + slot, place)
            owner = tl.load(owners + place)
            before = tl.load(owners + place - 1, mask=place > 0, other=-1)
            # Experts that begin here: this one, and those before it that have no place.
            tl.store(
                offsets + expert,
                tl.zeros((E2,), tl.int32) + place,
                mask=(expert > before) & (expert <= owner),
            )
            last = (place == number - 1) & (expert > owner) & (expert <= EXPERTS)
            tl.store(offsets + expert, tl.zeros((E2,), tl.int32) + number, mask=last)
    if (place == 0) & (tl.program_id(1) == 0) & (number == 0):
        tl.store(offsets + expert, tl.zeros((E2,), tl.int32), mask=expert <= EXPERTS)


@triton.jit
def combine_sorted(
    y, ids, weights, places, out, meta, rows,
    H: tl.constexpr, TOP: tl.constexpr, TOP2: tl.constexpr, COUNT: tl.constexpr, BN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out [rows, H]: of each token the TOP rows of y [places, H], times their weights, added up in the order of experts;
    padded rows are zero."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    token = tl.program_id(0)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    each = tl.arange(0, TOP2)
    total = tl.zeros((BN,), tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
    if token < live_rows(meta, rows, COUNT):
        turn = order_of(ids, token, TOP, TOP2)
        for j in tl.static_range(TOP):
            slot = token * TOP + tl.sum(tl.where((turn == j) & (each < TOP), each, 0))
            factor = tl.load(weights + slot).to(tl.float32)
            row = y + tl.load(places + slot).to(tl.int64) * H
            found = tl.load(row + n, mask=n < H, other=0.0).to(tl.float32)
            found = rounded(found * factor, out.dtype.element_ty)
            total = rounded(total + found, out.dtype.element_ty)
    tl.store(out + token.to(tl.int64) * H + n, total.to(out.dtype.element_ty), mask=n < H)
