"""Candidates and models of time for linears of few rows: kernels that load weights before their input is there."""

from collections.abc import Iterator

from compilerllm.kernels.triton.linear_shape import (
    L2_FACTOR,
    LAUNCH,
    SM_BYTES,
    SM_NORMED,
    Shape,
    Timed,
    power_of_two,
    together,
)
from compilerllm.kernels.triton.target import CudaTarget

GEMV_ROWS = 4
SKINNY_ROWS = 32
GEMV_SHARE = 0.97  # of the memory's bandwidth while a kernel reads weights
GEMV_TILES = (  # columns, elements of K, warps: as they did where they were measured, best first
    (2, 1024, 4), (4, 512, 4), (8, 512, 4), (4, 1024, 4), (2, 2048, 8), (1, 2048, 4), (4, 1024, 8), (2, 512, 2), (8, 256, 4),
)  # fmt: skip
ONE_ROW_TILES = (  # of skinny without tensor cores: columns, elements of K, warps
    (2, 1024, 4), (4, 1024, 4), (8, 1024, 4), (2, 2048, 8), (4, 2048, 8), (8, 512, 2), (16, 1024, 4), (1, 1024, 4),
    (8, 2048, 8),
)  # fmt: skip
SKINNY_TILES = (  # of skinny: columns, elements of K, warps, weights as the first operand
    (16, 1024, 8, True), (8, 1024, 8, False), (16, 1024, 4, True), (8, 1024, 4, False), (16, 512, 4, True), (8, 512, 4, False),
    (16, 2048, 8, True), (16, 512, 8, True), (32, 512, 4, True), (32, 512, 8, True), (8, 512, 8, False),
)  # fmt: skip
MOST_REGISTERS = 176  # of a thread for what it has loaded and its sums


def gemv(s: Shape, target: CudaTarget) -> Iterator[Timed]:
    """``linear:gemv``: up to ``GEMV_ROWS`` rows."""
    kept = {"norm": "inside"} if s.norm else {}
    rows = power_of_two(s.m)
    widest = max(32, power_of_two(s.k))
    done = set()
    for place, (bn, bk, warps) in enumerate(GEMV_TILES):
        bk = min(bk, widest)
        if (bn, bk, warps) in done:
            continue
        done.add((bn, bk, warps))
        each = bn * bk * s.halves // (32 * warps)  # elements of a tile in a thread
        if each * rows > 96:
            continue
        for pre in (2, 1, 0):
            if pre * bk < s.k + bk and pre * each <= 96:
                registers = each * rows + each * s.item // 4 * (pre + 1) + 32
                steps = max(0, -(-s.k // bk) - pre)
                # A norm takes the rows twice, once a tile behind barriers.
                serial = steps + (1.0 + 0.5 * (steps + pre) if s.norm else 0.0)
                cost = _cost(s, target, -(-s.n // bn), warps, registers, serial) * (1 + 0.01 * place)
                yield cost, {"path": "gemv", "bn": bn, "bk": bk, "pre": pre, "warps": warps} | kept


def gemv_rows(s: Shape, target: CudaTarget) -> Iterator[Timed]:
    """``linear:gemv_rows``: one row, held in registers."""
    widest = max(32, power_of_two(s.k))
    if s.m > 1 or widest > 8192:
        return
    kept = {"norm": "inside"} if s.norm else {}
    for warps in (2, 4, 8, 16):
        in_row = widest // (32 * warps)
        if not 4 <= in_row <= 32 and widest > 64:
            continue
        for bn in (1, 2, 4, 8):
            for steps in (2, 4, 8):
                if bn * in_row * s.halves <= 64 and s.n >= bn * steps * target.sms:
                    registers = in_row * (1 + bn * s.halves * s.item // 2) + 32
                    serial = steps + (1.0 if s.norm else 0.0)
                    cost = _cost(s, target, -(-s.n // (bn * steps)), warps, registers, serial)
                    yield cost, {"path": "gemv_rows", "bn": bn, "steps": steps, "warps": warps} | kept


def skinny(s: Shape, target: CudaTarget, tensor_cores: bool) -> Iterator[Timed]:
    """``skinny:skinny``: one row by elements, up to ``SKINNY_ROWS`` by tensor cores; norms in passing."""
    if s.norm and not s.wide:
        return
    kept = {"norm": "inside"} if s.norm else {}
    if s.m == 1:
        tiles = [(1, bn, bk, warps, True) for bn, bk, warps in ONE_ROW_TILES]
    elif tensor_cores and s.m <= SKINNY_ROWS:
        few = power_of_two(s.m)
        tiles = [(max(8 if swap else 16, few), bn, bk, warps, swap) for bn, bk, warps, swap in SKINNY_TILES]
    else:
        tiles = []
    for place, (bm, bn, bk, warps, swap) in enumerate(tiles):
        bk = min(bk, max(16 * warps, power_of_two(s.k)))
        if bm == 1 and place > 0 and bk < 256 * warps:  # a warp takes in 256 columns at a time
            continue
        tiles_k = -(-s.k // bk)
        fitting = 0
        for pre in sorted({min(tiles_k, p) for p in (4, 2, 1)}, reverse=True):
            rest = tiles_k - pre
            passing = 2 if swap and bm > 1 else 1  # weights that go on to shared memory at once
            weights = s.halves * bn // passing
            loaded = pre * bk * (weights + bm * (2 if s.norm else 1)) * s.item // (4 * 32 * warps)
            sums = (bk // warps // 32 if bm == 1 else 1) * bm * bn * s.halves // 32
            if rest:  # a loop keeps its loads' addresses
                loaded += (
                    5 * bk * (s.halves * bn + bm * (2 if s.norm else 1)) // (8 * 32 * warps) if bm > 1 else 0
                )
            stages = 1 if rest == 0 or bm == 1 else 3
            step_bytes = bk * s.item * (s.halves * bn + bm * (2 if s.norm else 1))
            shared = 0 if bm == 1 else pre * s.halves * bn * bk * s.item + bm * bk * s.item
            shared += stages * step_bytes if rest and bm > 1 else 0
            if fitting == 2 or loaded + sums > MOST_REGISTERS or shared > target.shared - 8192:
                continue
            fitting += 1
            serial = rest / max(1, stages - 1) + (0.0 if bm == 1 else 0.6)
            fits = target.shared // max(1, shared)
            cost = _cost(s, target, -(-s.n // bn), warps, loaded + sums + 40, serial, fits)
            yield cost * (1 + 0.01 * place), {
                "path": "skinny", "bm": bm, "bn": bn, "bk": bk, "pre": pre, "swap": swap, "warps": warps, "stages": stages,
            } | kept  # fmt: skip


def _cost(
    s: Shape, target: CudaTarget, programs: int, warps: int, registers: int, serial: float, fits: int = 32
) -> float:
    """serial: latencies that a program waits for one after another, beside that of its rows; fits: programs that the shared
    memory of an SM holds."""
    bandwidth = target.bandwidth * 1e9
    resident = max(1, min(64 // warps, 65536 // (32 * warps * min(255, registers)), 32, fits))
    waves = programs / (target.sms * resident)
    tail = 0.0 if waves <= 1 else (-(-programs // (target.sms * resident)) - waves) / waves * 0.15
    # Every program reads the rows again, some of it from its SM's own cache; a norm reads the addend too.
    share = 0.1 if s.m == 1 else 0.3
    again = programs * s.m * s.k * s.item * (2 if s.norm else 1) * share / (L2_FACTOR * bandwidth)
    on_sm = -(-programs // target.sms) * s.weight_bytes / programs / SM_BYTES
    if s.m == 1:  # as measured: some programs of an SM end while others load
        again += 0.6e-6 * max(0.0, 1 - programs / (3.5 * target.sms))
    normed = -(-programs // target.sms) * s.m * s.k / SM_NORMED if s.norm else 0.0
    moved = together(
        normed,
        s.weight_bytes / (GEMV_SHARE * bandwidth) * (1 + tail),
        on_sm,
        serial * 0.6e-6 * max(1.0, waves),
    )
    return LAUNCH + 0.3e-6 + moved + again
