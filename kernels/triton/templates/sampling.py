"""Choosing tokens from f32 logits [R, V] without sorting them.

Greedy rows take one kernel. Others take four: ``survey`` and ``collect`` read the logits with many programs a row,
``bound`` and ``draw`` are one program a row. ``bound`` finds from the largest values of groups of columns a value that
no cut can lie below, ``collect`` lists what is at least that large, and ``draw`` bisects in the list for the exact
cuts. Where the list is too short, ``draw`` bisects over the row itself: the same result, slower.

A row's parameters are 16 words (``compilerllm.kernels.launch.gpu.sampling.RowLayout``); rows at or past meta[0] do
nothing. NaN counts as -inf.
"""

import triton
import triton.language as tl

WORDS: tl.constexpr = tl.constexpr(16)
NOTHING: tl.constexpr = tl.constexpr(-(1 << 63) + 1)  # below the code of -inf


@triton.jit
def word(params, row, INDEX: tl.constexpr):
    """An integer parameter of a row."""
    return tl.load(params + row * WORDS + INDEX)


@triton.jit
def number(params, row, INDEX: tl.constexpr):
    """A float parameter of a row."""
    return tl.load(params + row * WORDS + INDEX).to(tl.float32, bitcast=True)


@triton.jit
def key_of(x):
    """Integers in the order of the values; -0 equals 0."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def value_of(key):
    """The value whose key this is."""
    key = key.to(tl.int32)
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def code_of(x, column):
    """Value and column in one integer: larger values first, then lower columns."""
    return (key_of(x).to(tl.int64) << 32) | (0x7FFFFFFF - column).to(tl.int64)


@triton.jit
def column_of(code):
    """The column in a code."""
    return (0x7FFFFFFF - (code & 0x7FFFFFFF)).to(tl.int32)


@triton.jit
def load_row(line, column, end):
    """Logits with NaN as -inf; -inf from ``end`` on."""
    x = tl.load(line + column, mask=column < end, other=float("-inf"))
    return tl.where(x == x, x, float("-inf"))


@triton.jit
def widest(line, start, end, BLOCK: tl.constexpr):
    """Largest code of each of BLOCK interleaved groups of the columns [start, end)."""
    lane = tl.arange(0, BLOCK)
    best = tl.full((BLOCK,), NOTHING, tl.int64)
    for at in range(start, end, BLOCK):
        column = at + lane
        x = load_row(line, column, end)
        best = tl.maximum(best, tl.where(column < end, code_of(x, column), NOTHING))
    return best


@triton.jit
def greedy(
    logits, slots, sampled, results, ring, last_token, partial, counters,
    V: tl.constexpr, SPAN: tl.constexpr, SPLITS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Grid (R, SPLITS): the most likely token of each row. Whoever ends last in a row compares the row's parts."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0)
    split = tl.program_id(1)
    start = split * SPAN
    best = tl.max(widest(logits + row.to(tl.int64) * V, start, tl.minimum(start + SPAN, V), BLOCK), 0)
    tl.store(partial + row * SPLITS + split, best)
    before = tl.atomic_add(counters + row, 1, sem="acq_rel")
    if before == SPLITS - 1:
        parts = tl.load(partial + row * SPLITS + tl.arange(0, SPLITS), cache_modifier=".cg")
        token = column_of(tl.max(parts, 0))
        tl.store(counters + row, 0)
        finish(sampled, results, ring, last_token, tl.load(slots + row), row, token, ROWS)


@triton.jit
def finish(sampled, results, ring, last_token, slot, row, token, ROWS: tl.constexpr):
    """Write a row's token: for what follows on the device, and into the host's results [steps, ROWS] at place ring[0]."""
    tl.store(sampled + row, token)
    tl.store(results + tl.load(ring) * ROWS + row, token)
    if slot >= 0:
        tl.store(last_token + slot, token)


@triton.jit
def survey(
    logits, params, meta, codes, tops, sums,
    V: tl.constexpr, SPAN: tl.constexpr, SPLITS: tl.constexpr, GROUPS: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Grid (R, SPLITS). codes [R, SPLITS]: each part's largest. tops [R, SPLITS * GROUPS]: largest logits of groups.
    sums [R, SPLITS]: of exp((x - the part's largest) / temperature), where a top-p wants it."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0)
    split = tl.program_id(1)
    if row < tl.load(meta):
        line = logits + row.to(tl.int64) * V
        start = split * SPAN
        end = tl.minimum(start + SPAN, V)
        best = widest(line, start, end, BLOCK)
        code = tl.max(best, 0)
        place = row * SPLITS + split
        tl.store(codes + place, code)
        temperature = number(params, row, 1)
        if temperature > 0:
            x = tl.where(best == NOTHING, float("-inf"), value_of(best >> 32))
            tl.store(
                tops + place * GROUPS + tl.arange(0, GROUPS),
                tl.max(tl.reshape(x, (GROUPS, BLOCK // GROUPS)), 1),
            )
            if number(params, row, 3) < 1:
                peak = tl.where(code == NOTHING, float("-inf"), value_of(code >> 32))
                total = tl.zeros((BLOCK,), tl.float32)
                for at in range(start, end, BLOCK):
                    x = load_row(line, at + tl.arange(0, BLOCK), end)
                    total += tl.where(x > float("-inf"), tl.exp((x - peak) / temperature), 0.0)
                tl.store(sums + place, tl.sum(total, 0))


@triton.jit
def bound(
    params, meta, codes, tops, sums, bounds, used,
    V: tl.constexpr, SPLITS: tl.constexpr, GROUPS: tl.constexpr, STEPS: tl.constexpr, RANGE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Grid (R). bounds [R, 4]: the largest scaled logit, the lowest that min-p leaves, a value that no cut lies below.
    used [R]: 0, for ``collect`` to count from.

    Groups' largest values are some of the row's: if k of them are at least t, so is the k-th largest of all, and if
    their mass from t up is top-p's share of the whole, the cut is no lower.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0)
    temperature = number(params, row, 1)
    if (row < tl.load(meta)) & (temperature > 0):
        z = tl.load(tops + row * SPLITS * GROUPS + tl.arange(0, SPLITS * GROUPS))
        z = scaled(z, temperature)
        peak = tl.max(z, 0)
        low = peak + number(params, row, 4)
        cut = low
        top_k = word(params, row, 2)
        top_p = number(params, row, 3)
        by_count = (top_k > 0) & (top_k < V)
        if (by_count | (top_p < 1)) & (peak > float("-inf")):
            weight = tl.exp(z - peak)
            enough = top_k.to(tl.float32)
            if by_count:
                weight = tl.full((SPLITS * GROUPS,), 1.0, tl.float32)
            else:
                place = row * SPLITS + tl.arange(0, SPLITS)
                parts = tl.load(codes + place)
                largest = tl.where(parts == NOTHING, float("-inf"), value_of(parts >> 32))
                # A little more than the share: sums here are rounded, and the bound must hold.
                share = tl.load(sums + place) * tl.exp(largest / temperature - peak)
                enough = tl.sum(tl.where(largest > float("-inf"), share, 0.0), 0) * top_p * 1.0001
            below = peak - RANGE
            if tl.sum(tl.where(z >= below, weight, 0.0), 0) >= enough:
                step = RANGE * 0.5
                for _ in range(STEPS):
                    held = tl.sum(tl.where(z >= below + step, weight, 0.0), 0) >= enough
                    below = tl.where(held, below + step, below)
                    step = step * 0.5
                cut = tl.maximum(low, below)
        tl.store(bounds + row * 4, peak)
        tl.store(bounds + row * 4 + 1, low)
        tl.store(bounds + row * 4 + 2, cut)
        tl.store(used + row, 0)


@triton.jit
def scaled(x, temperature):
    """Logits over the temperature, rounded once, as the reference does."""
    return tl.div_rn(x, tl.zeros_like(x) + temperature)


@triton.jit
def is_cut(params, row, V: tl.constexpr):
    """Whether anything but min-p cuts the row."""
    top_k = word(params, row, 2)
    return ((top_k > 0) & (top_k < V)) | (number(params, row, 3) < 1)


@triton.jit
def collect(
    logits, params, meta, bounds, masses, list_x, list_id, used,
    V: tl.constexpr, SPAN: tl.constexpr, SPLITS: tl.constexpr, LIST: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Grid (R, SPLITS). masses [R, SPLITS]: f64, of what min-p leaves. list_x, list_id [R, LIST]: logits and columns of
    what may survive top-k and top-p, in any order; used [R] counts them, also those there was no room for."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0)
    split = tl.program_id(1)
    temperature = number(params, row, 1)
    if (row < tl.load(meta)) & (temperature > 0):
        line = logits + row.to(tl.int64) * V
        start = split * SPAN
        end = tl.minimum(start + SPAN, V)
        peak = tl.load(bounds + row * 4)
        low = tl.load(bounds + row * 4 + 1)
        cut = tl.load(bounds + row * 4 + 2)
        listed = is_cut(params, row, V)
        lane = tl.arange(0, BLOCK)
        total = tl.zeros((BLOCK,), tl.float64)
        for at in range(start, end, BLOCK):
            column = at + lane
            x = load_row(line, column, end)
            z = scaled(x, temperature)
            stays = (z >= low) & (z > float("-inf"))
            total += tl.where(stays, tl.exp(z - peak), 0.0).to(tl.float64)
            if listed:
                kept = ((z >= cut) & (z > float("-inf"))).to(tl.int32)
                count = tl.sum(kept, 0)
                if count > 0:
                    place = tl.atomic_add(used + row, count, sem="relaxed") + tl.cumsum(kept, 0) - 1
                    fits = (kept != 0) & (place < LIST)
                    tl.store(list_x + row * LIST + place, x, mask=fits)
                    tl.store(list_id + row * LIST + place, column, mask=fits)
        tl.store(masses + row * SPLITS + split, tl.sum(total, 0))


@triton.jit
def count_from(source, size, temperature, low, BLOCK: tl.constexpr):
    """How many of ``size`` logits are at least ``low`` when scaled."""
    found = tl.zeros((BLOCK,), tl.int32)
    for at in range(0, size, BLOCK):
        z = scaled(load_row(source, at + tl.arange(0, BLOCK), size), temperature)
        found += ((z >= low) & (at + tl.arange(0, BLOCK) < size)).to(tl.int32)
    return tl.sum(found, 0)


@triton.jit
def mass_from(source, size, temperature, peak, low, BLOCK: tl.constexpr):
    """Mass of those that are at least ``low``, f64."""
    total = tl.zeros((BLOCK,), tl.float64)
    for at in range(0, size, BLOCK):
        z = scaled(load_row(source, at + tl.arange(0, BLOCK), size), temperature)
        total += tl.where((z >= low) & (z > float("-inf")), tl.exp(z - peak), 0.0).to(tl.float64)
    return tl.sum(total, 0)


@triton.jit
def pick_listed(source, ids, size, temperature, peak, low, goal, BLOCK: tl.constexpr):
    """The lowest id up to which the mass of what stays exceeds ``goal``; of a list in any order."""
    last = tl.zeros((BLOCK,), tl.int32)
    for at in range(0, size, BLOCK):
        place = at + tl.arange(0, BLOCK)
        z = scaled(load_row(source, place, size), temperature)
        column = tl.load(ids + place, mask=place < size, other=0)
        last = tl.maximum(last, tl.where((z >= low) & (place < size), column, 0))
    high = tl.max(last, 0)
    below = high * 0 - 1
    while below + 1 < high:
        middle = (below + high) // 2
        total = tl.zeros((BLOCK,), tl.float64)
        for at in range(0, size, BLOCK):
            place = at + tl.arange(0, BLOCK)
            z = scaled(load_row(source, place, size), temperature)
            column = tl.load(ids + place, mask=place < size, other=0x7FFFFFFF)
            stays = (z >= low) & (column <= middle) & (z > float("-inf"))
            total += tl.where(stays, tl.exp(z - peak), 0.0).to(tl.float64)
        passed = tl.sum(total, 0) > goal
        high = tl.where(passed, middle, high)
        below = tl.where(passed, below, middle)
    return high


@triton.jit
def pick_ordered(line, start, end, temperature, peak, low, goal, BLOCK: tl.constexpr):
    """The same for the columns [start, end) of a row, in one pass to find the block and a running sum in it."""
    lane = tl.arange(0, BLOCK)
    running = goal * 0.0
    base = running
    found = start * 0 - 1
    last = found
    for at in range(start, end, BLOCK):
        z = scaled(load_row(line, at + lane, end), temperature)
        stays = (z >= low) & (z > float("-inf"))
        part = tl.sum(tl.where(stays, tl.exp(z - peak), 0.0).to(tl.float64), 0)
        here = (found < 0) & (running + part > goal)
        last = tl.where(tl.max(stays.to(tl.int32), 0) > 0, at, last)
        found = tl.where(here, at, found)
        base = tl.where(here, running, base)
        running += part
    block = tl.where(found < 0, tl.maximum(last, start), found)
    z = scaled(load_row(line, block + lane, end), temperature)
    stays = (z >= low) & (z > float("-inf"))
    sums = base + tl.cumsum(tl.where(stays, tl.exp(z - peak), 0.0).to(tl.float64), 0)
    first = tl.min(tl.where(stays & (sums > goal) & (found >= 0), lane, BLOCK), 0)
    final = tl.max(tl.where(stays, lane, 0), 0)
    return block + tl.where(first < BLOCK, first, final)


@triton.jit
def times(a, b: tl.constexpr):
    """Both halves of a product of 32-bit numbers, each in 64 bits."""
    product = a * tl.full((), b, tl.uint64)
    return product >> 32, product & 0xFFFFFFFF


@triton.jit
def uniform(seed_low, seed_high, draw_low, draw_high):
    """A number in [0, 1) of 53 bits: Philox4x32-10 of the seed at the draw's number."""
    mask = tl.full((), 0xFFFFFFFF, tl.uint64)
    k0 = seed_low.to(tl.uint64) & mask
    k1 = seed_high.to(tl.uint64) & mask
    c0 = draw_low.to(tl.uint64) & mask
    c1 = draw_high.to(tl.uint64) & mask
    c2 = c0 & 0
    c3 = c0 & 0
    for _ in range(10):
        first_high, first_low = times(c0, 0xD2511F53)
        second_high, second_low = times(c2, 0xCD9E8D57)
        c0 = second_high ^ c1 ^ k0
        c1 = second_low
        c2 = first_high ^ c3 ^ k1
        c3 = first_low
        k0 = (k0 + 0x9E3779B9) & mask
        k1 = (k1 + 0xBB67AE85) & mask
    bits = ((c1 << 32) | c0) >> 11
    return bits.to(tl.int64).to(tl.float64) * 1.1102230246251565e-16


@triton.jit
def draw(
    logits, params, meta, codes, bounds, masses, list_x, list_id, used, sampled, results, ring, last_token,
    V: tl.constexpr, SPAN: tl.constexpr, SPLITS: tl.constexpr, LIST: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (R): the exact cuts, then the token."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0)
    if row < tl.load(meta):
        temperature = number(params, row, 1)
        parts = tl.arange(0, SPLITS)
        token = column_of(tl.max(tl.load(codes + row * SPLITS + parts), 0))
        if temperature > 0:
            peak = tl.load(bounds + row * 4)
            low = tl.load(bounds + row * 4 + 1)
            size = tl.load(used + row)
            line = logits + row.to(tl.int64) * V
            chance = uniform(
                word(params, row, 8), word(params, row, 9), word(params, row, 10), word(params, row, 11)
            )
            running = tl.cumsum(tl.load(masses + row * SPLITS + parts), 0)
            mass = tl.max(running, 0)
            if peak == float("-inf"):
                token = token * 0
            elif is_cut(params, row, V):
                source = list_x + row.to(tl.int64) * LIST
                whole = size > LIST
                if whole:
                    source = line
                    size = size * 0 + V
                floor = key_of(tl.load(bounds + row * 4 + 2)).to(tl.int64)
                top_k = word(params, row, 2)
                if (top_k > 0) & (top_k < V):
                    below = floor
                    above = key_of(peak).to(tl.int64) + 1
                    while below + 1 < above:
                        middle = (below + above) >> 1
                        held = count_from(source, size, temperature, value_of(middle), BLOCK) >= top_k
                        below = tl.where(held, middle, below)
                        above = tl.where(held, above, middle)
                    low = tl.maximum(low, value_of(below))
                    mass = mass_from(source, size, temperature, peak, low, BLOCK)
                top_p = number(params, row, 3)
                if top_p < 1:
                    goal = mass * top_p.to(tl.float64)
                    below = tl.maximum(floor, key_of(low).to(tl.int64))
                    above = key_of(peak).to(tl.int64) + 1
                    while below + 1 < above:
                        middle = (below + above) >> 1
                        held = mass_from(source, size, temperature, peak, value_of(middle), BLOCK) >= goal
                        below = tl.where(held, middle, below)
                        above = tl.where(held, above, middle)
                    low = tl.maximum(low, value_of(below))
                    mass = mass_from(source, size, temperature, peak, low, BLOCK)
                if whole:
                    token = pick_ordered(line, 0, V, temperature, peak, low, chance * mass, BLOCK)
                else:
                    ids = list_id + row.to(tl.int64) * LIST
                    token = pick_listed(source, ids, size, temperature, peak, low, chance * mass, BLOCK)
            else:
                goal = chance * mass
                part = tl.minimum(tl.sum((running <= goal).to(tl.int32), 0), SPLITS - 1)
                before = tl.sum(tl.where(parts == part - 1, running, 0.0), 0)
                start = part * SPAN
                token = pick_ordered(
                    line, start, tl.minimum(start + SPAN, V), temperature, peak, low, goal - before, BLOCK
                )
        finish(sampled, results, ring, last_token, word(params, row, 0), row, token, ROWS)
