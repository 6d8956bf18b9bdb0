"""Token alignment: slots (a token with one of its experts: token * TOP + place) in blocks of BM by expert.

A block holds slots of one expert in ascending order, -1 where it is not full. ``slots`` is [blocks, BM], ``owners`` the
expert of each block, ``used`` [1] the number of blocks. Slots of padded rows are in no block.
"""

import triton
import triton.language as tl


@triton.jit
def live_rows(meta, rows, COUNT: tl.constexpr):
    """Rows of the launch that are real: entry COUNT of the step's meta, all without a step (COUNT < 0)."""
    if COUNT >= 0:
        rows = tl.minimum(tl.load(meta + COUNT), rows)
    return rows


@triton.jit
def align(
    ids, slots, owners, used, meta, rows,
    TOP: tl.constexpr, E2: tl.constexpr, N2: tl.constexpr, BM: tl.constexpr, BLOCKS2: tl.constexpr,
    COUNT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program for each expert; each reads all ids [rows, TOP], at most N2. BLOCKS2: above ceil(N2 / BM)."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    expert = tl.program_id(0)
    slot = tl.arange(0, N2)
    experts = tl.arange(0, E2)
    block = tl.arange(0, BLOCKS2)
    if PDL:
        tl.extra.cuda.gdc_wait()
    real = slot < live_rows(meta, rows, COUNT) * TOP
    owner = tl.load(ids + slot, mask=real, other=0).to(tl.int32)
    count = tl.histogram(owner, E2, mask=real)
    blocks = (count + BM - 1) // BM
    first = tl.sum(tl.where(experts < expert, blocks, 0))
    mine = real & (owner == expert)
    total = tl.sum(tl.where(experts == expert, count, 0))
    own = (total + BM - 1) // BM
    place = tl.cumsum(mine.to(tl.int32), 0) - 1
    tl.store(slots + first * BM + place, slot, mask=mine)
    padding = total + tl.arange(0, BM)
    tl.store(slots + first * BM + padding, tl.full((BM,), -1, tl.int32), mask=padding < own * BM)
    tl.store(owners + first + block, tl.zeros((BLOCKS2,), tl.int32) + expert, mask=block < own)
    if expert == 0:
        tl.store(used, tl.sum(blocks))


@triton.jit
def count_chunks(
    ids, counts, meta, rows,
    TOP: tl.constexpr, E2: tl.constexpr, CHUNK: tl.constexpr, COUNT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """For many slots, first of two: counts [chunks, E2] of each expert's slots in each chunk of CHUNK slots."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    chunk = tl.program_id(0)
    slot = chunk * CHUNK + tl.arange(0, CHUNK)
    if PDL:
        tl.extra.cuda.gdc_wait()
    real = slot < live_rows(meta, rows, COUNT) * TOP
    owner = tl.load(ids + slot, mask=real, other=0).to(tl.int32)
    tl.store(counts + chunk * E2 + tl.arange(0, E2), tl.histogram(owner, E2, mask=real))


@triton.jit
def place_chunks(
    ids, counts, slots, owners, used, meta, rows, chunks,
    TOP: tl.constexpr, E2: tl.constexpr, BM: tl.constexpr, CHUNK: tl.constexpr, STEP: tl.constexpr,
    PART: tl.constexpr, COUNT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Second of two: a program places its chunk's slots, STEP compared at a time, and fills in a share of the blocks.
    PART: chunks whose counts are added at a time, and blocks filled in at a time."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    chunk = tl.program_id(0)
    experts = tl.arange(0, E2)
    place = tl.arange(0, CHUNK)
    part = tl.arange(0, PART)
    total = tl.zeros((E2,), tl.int32)
    before = tl.zeros((E2,), tl.int32)
    if PDL:
        tl.extra.cuda.gdc_wait()
    live = live_rows(meta, rows, COUNT) * TOP
    for start in range(0, chunks, PART):
        other = start + part[:, None]
        found = tl.load(counts + other * E2 + experts[None, :], mask=other < chunks, other=0)
        total += tl.sum(found, 0)
        before += tl.sum(tl.where(other < chunk, found, 0), 0)
    blocks = (total + BM - 1) // BM
    ends = tl.cumsum(blocks, 0)
    starts = (ends - blocks) * BM
    number = tl.sum(blocks)

    slot = chunk * CHUNK + place
    real = slot < live
    owner = tl.load(ids + slot, mask=real, other=0).to(tl.int32)
    rank = tl.zeros((CHUNK,), tl.int32)
    for start in range(0, CHUNK, STEP):
        earlier = start + tl.arange(0, STEP)
        theirs = tl.load(ids + chunk * CHUNK + earlier, mask=chunk * CHUNK + earlier < live, other=-1).to(
            tl.int32
        )
        same = (theirs[None, :] == owner[:, None]) & (earlier[None, :] < place[:, None])
        rank += tl.sum(same.to(tl.int32), 1)
    tl.store(slots + tl.gather(starts + before, owner, 0) + rank, slot, mask=real)

    for start in range(chunk * PART, number, chunks * PART):
        block = start + part
        expert = tl.minimum(tl.sum((ends[None, :] <= block[:, None]).to(tl.int32), 1), E2 - 1)
        tl.store(owners + block, expert, mask=block < number)
        last = tl.gather(starts + total, expert, 0)
        at = block[:, None] * BM + tl.arange(0, BM)[None, :]
        empty = (block < number)[:, None] & (at >= last[:, None])
        tl.store(slots + at, tl.full((PART, BM), -1, tl.int32), mask=empty)
    if chunk == 0:
        tl.store(used, number)
