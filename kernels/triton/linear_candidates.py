"""Ways to run a linear on a CUDA target, the best by a simple model of time first.

A candidate is a flat dict. ``path`` says which kernels: ``gemv`` (few rows), ``gemv_rows`` (one row held in registers),
``matmul`` (tiles), ``cublas`` or ``cutlass`` (a library call and, where something comes after the product, one more
kernel; cutlass by its instance's name). For ops that norm first, ``norm`` says whether the kernel does it itself.
Every candidate is valid for any number of rows up to the problem's.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from compilerllm.kernels.triton.target import CudaTarget

Candidate = dict[str, Any]
MOST_GEMV, MOST_TILES = 12, 24  # candidates of one path: each takes a second to compile where all are timed
GEMV_ROWS = 4
L2_FACTOR = 2.0  # read bandwidth of the L2 over the memory's
LATENCY = 0.8e-6  # seconds from a load to its data
LAUNCH = 1.5e-6
LAUNCH_LIBRARY = 5e-6  # a library's kernel neither starts early nor lets the next one
GEMV_SHARE, MATMUL_SHARE, LIBRARY_SHARE = (
    0.97,
    0.92,
    0.85,
)  # of the memory's bandwidth while a kernel reads weights
SM_BYTES = 60e9  # bytes a second that one SM can take in
GEMV_TILES = (  # columns, elements of K, warps: as they did where they were measured, best first
    (2, 1024, 4), (4, 512, 4), (4, 1024, 4), (1, 2048, 4), (8, 512, 4), (2, 2048, 8), (4, 1024, 8), (2, 512, 2), (8, 256, 4),
    (4, 256, 2), (16, 256, 4),
)  # fmt: skip
TILES = (  # rows, columns, elements of K, warps
    (16, 32, 256, 4), (16, 64, 128, 4), (16, 64, 256, 4), (16, 128, 64, 4), (16, 128, 128, 4),
    (32, 32, 256, 4), (32, 64, 128, 4), (32, 64, 256, 4), (32, 128, 64, 4), (32, 128, 128, 4),
    (64, 32, 128, 4), (64, 64, 64, 4), (64, 64, 128, 4), (64, 128, 64, 4), (64, 128, 128, 4), (64, 256, 64, 4),
    (128, 64, 64, 4), (128, 64, 128, 4), (128, 128, 64, 4), (128, 128, 64, 8), (128, 256, 64, 8), (256, 128, 64, 8),
)  # fmt: skip
WIDE_TILES = ((16, 32, 32, 4), (32, 32, 32, 4), (64, 32, 32, 4), (64, 64, 32, 8))  # f32, no tensor cores


@dataclass(frozen=True)
class Shape:
    """A linear: M rows at most, N result columns, K; ``halves`` 2 with a gate. item: bytes of an element, out: of a result's."""

    m: int
    n: int
    k: int
    item: int
    out: int
    halves: int
    after: bool  # anything but the product
    bias: bool
    norm: bool

    @property
    def weight_bytes(self) -> int:
        return self.halves * self.n * self.k * self.item

    @property
    def flops(self) -> int:
        return 2 * self.m * self.halves * self.n * self.k


def power_of_two(count: int) -> int:
    """The smallest that is not below ``count``."""
    return 1 << max(0, count - 1).bit_length()


def candidates(
    s: Shape, target: CudaTarget, tensor_cores: bool, cutlass: Sequence[str] = ()
) -> list[Candidate]:
    """A few of each path, the cost model's order. tensor_cores: whether they multiply the dtype exactly; cutlass: names of
    instances, which follow cuBLAS: nothing but a measurement puts one first."""
    found: list[tuple[float, Candidate]] = []
    apart = {"norm": "apart"} if s.norm else {}
    extra = LAUNCH + 1e-6 if s.norm else 0.0
    few = s.m <= GEMV_ROWS
    if few:
        found += _best(_gemv(s, target), MOST_GEMV) + _best(_gemv_rows(s, target), MOST_GEMV // 2)
        if s.norm:
            plain = replace(s, norm=False)
            ways = _best(_gemv(plain, target), MOST_GEMV // 4) + _best(_gemv_rows(plain, target), 1)
            found += [(cost + extra, c | apart) for cost, c in ways]
    tiles = _varied(_best(_matmul(s, target, tensor_cores)))[: MOST_TILES // (3 if few else 1)]
    library = _library_cost(s, target)
    tiles.append((library, {"path": "cublas"}))
    tiles += [
        (library * (1 + 0.001 * place), {"path": "cutlass", "instance": name})
        for place, name in enumerate(cutlass, 1)
    ]
    found += [(cost + extra, c | apart) for cost, c in tiles]
    return [c for _, c in _best(found)]


def _best(found: Iterable[tuple[float, Candidate]], most: int | None = None) -> list[tuple[float, Candidate]]:
    """The cheapest ones, cheapest first; equally cheap ones as they came."""
    return sorted(found, key=lambda f: f[0])[:most]


def _varied(found: list[tuple[float, Candidate]]) -> list[tuple[float, Candidate]]:
    """At most two of each tile size (they differ in stages and splits); the best ones also with nothing fetched ahead."""
    count: dict[tuple[int, ...], int] = {}
    kept = []
    for place, (cost, c) in enumerate(found):
        key = c["bm"], c["bn"], c["bk"], c["warps"], c["swap"]
        count[key] = count.get(key, 0) + 1
        if count[key] <= 2:
            kept.append((cost, c))
        if place < 3 and c["ahead"]:
            kept.append((cost * 1.02, c | {"ahead": 0}))
    return sorted(kept, key=lambda f: f[0])


def _gemv(s: Shape, target: CudaTarget) -> Iterator[tuple[float, Candidate]]:
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
                cost = _gemv_cost(s, target, -(-s.n // bn), warps, registers, pre) * (1 + 0.004 * place)
                yield cost, {"path": "gemv", "bn": bn, "bk": bk, "pre": pre, "warps": warps} | kept


def _gemv_rows(s: Shape, target: CudaTarget) -> Iterator[tuple[float, Candidate]]:
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
                    cost = _gemv_cost(s, target, -(-s.n // (bn * steps)), warps, registers, 1)
                    # Without a norm to do once there is less to gain than one tile at a time loses.
                    cost *= 1.0 if s.norm else 1.02
                    yield cost, {"path": "gemv_rows", "bn": bn, "steps": steps, "warps": warps} | kept


def _gemv_cost(s: Shape, target: CudaTarget, programs: int, warps: int, registers: int, pre: int) -> float:
    bandwidth = target.bandwidth * 1e9
    resident = max(1, min(64 // warps, 65536 // (32 * warps * min(255, registers)), 32))
    waves = programs / (target.sms * resident)
    tail = 0.0 if waves <= 1 else (-(-programs // (target.sms * resident)) - waves) / waves * 0.15
    # Every program reads the rows again, some of it from its SM's own cache; a norm reads them and the addend twice.
    again = programs * s.m * s.k * s.item * (5 if s.norm else 1) * 0.15 / (L2_FACTOR * bandwidth)
    start = (0.3e-6 if pre else 0.8e-6) + (0.6e-6 if s.norm else 0.0)
    busy = min(1.0, programs * warps / (target.sms * 12))  # too few warps leave memory idle
    return LAUNCH + start + s.weight_bytes / (GEMV_SHARE * bandwidth) * (1 + tail) / max(busy, 0.05) + again


def _matmul(s: Shape, target: CudaTarget, tensor_cores: bool) -> Iterator[tuple[float, Candidate]]:
    largest = power_of_two(s.m)
    for bm, bn, bk, warps in TILES if tensor_cores else WIDE_TILES:
        if bm > max(16, largest) or (bm < min(64, largest) and tensor_cores):
            continue
        sums = (
            bm * bn * s.halves // (32 * warps)
        )  # in each thread; more registers than there are go to memory
        if sums > 128 or (sums == 128 and s.halves == 2 and bk > 64):
            continue
        if bk > max(32, power_of_two(s.k)) or bn > max(32, power_of_two(s.n)):
            continue
        step_bytes = (bm + s.halves * bn) * bk * s.item
        for stages in (3, 4, 6):
            if stages * step_bytes > target.shared - 4096:
                continue
            if stages == 6 and step_bytes > 24576:
                continue
            tiles = -(-s.m // bm) * -(-s.n // bn)
            steps = -(-s.k // bk)
            for split in (1, 2, 4, 8):
                if split > 1 and (steps < 4 * split or tiles * split > 4 * target.sms or s.m > 512):
                    continue
                for swap in (True, False) if bm < 64 and bn >= 64 and tensor_cores else (False,):
                    cost = _matmul_cost(s, target, bm, bn, bk, stages, split, swap, tensor_cores, warps)
                    ahead = 4 if s.m <= 128 and steps // split >= 4 and target.pdl else 0
                    yield cost, {
                        "path": "matmul", "bm": bm, "bn": bn, "bk": bk, "split": split, "swap": swap, "ahead": ahead,
                        "group": 8, "warps": warps, "stages": stages,
                    }  # fmt: skip


def _matmul_cost(
    s: Shape, target: CudaTarget, bm: int, bn: int, bk: int, stages: int, split: int, swap: bool, tensor_cores: bool,
    warps: int,
) -> float:  # fmt: skip
    bandwidth = target.bandwidth * 1e9
    step_bytes = (bm + s.halves * bn) * bk * s.item
    resident = max(1, min((target.shared + 1024) // (stages * step_bytes), 64 // warps, 6))
    if bm * bn * s.halves >= 128 * 128:
        resident = min(resident, 2 if bm * bn * s.halves == 128 * 128 and warps == 4 else 1)
    steps = -(-s.k // (bk * split))
    columns, rows = -(-s.n // bn), -(-s.m // bm)
    programs = columns * rows * split
    peak = target.tflops * 1e12 * _share(bm, bn * s.halves, swap, tensor_cores)
    weights = s.halves * bn * bk * s.item * steps / rows  # each weight comes from memory once
    time, left = 0.0, programs
    while left > 0:
        wave = min(left, target.sms * resident)
        on_sm = -(-wave // target.sms)
        rate = min(SM_BYTES, on_sm * (stages - 1) * step_bytes / LATENCY)
        count = 1 if left <= target.sms * resident else max(1, left // (target.sms * resident))
        time += count * max(
            wave * weights / (MATMUL_SHARE * bandwidth),
            wave * step_bytes * steps / (L2_FACTOR * bandwidth),
            on_sm * step_bytes * steps / rate,
            on_sm * 2 * bm * s.halves * bn * bk * steps / (peak / target.sms),
        )
        left -= count * wave
    sums = 2 * split * s.m * s.n * s.halves * 4 if split > 1 else 0
    fill = LATENCY + (1.2e-6 if split > 1 else 0.0)
    return LAUNCH + fill + time + sums / (L2_FACTOR * bandwidth) + s.m * s.n * s.out / bandwidth


def _share(bm: int, bn: int, swap: bool, tensor_cores: bool) -> float:
    """Part of the matrix peak that tiles of this size reach."""
    if not tensor_cores:
        return 0.05
    if swap:
        return {16: 0.25, 32: 0.4}[bm]
    if bm < 64:
        return 0.15 if bm == 16 else 0.25
    return {1: 0.35, 2: 0.5, 4: 0.62, 8: 0.72}.get(bm * bn // 4096, 0.72 if bm * bn >= 32768 else 0.3)


def _library_cost(s: Shape, target: CudaTarget) -> float:
    bandwidth = target.bandwidth * 1e9
    moved = s.weight_bytes + s.m * (s.k * s.item + s.n * s.halves * s.out)
    tiles = max(1.0, 64 / max(s.m, 1))  # a tile that is mostly padding
    time = max(moved / (LIBRARY_SHARE * bandwidth), s.flops * tiles / (0.85 * target.tflops * 1e12))
    if s.after:
        product = 4 if s.bias else s.item
        time += LAUNCH + (s.m * s.n * (s.halves * product * 2 + s.out)) / (0.9 * bandwidth)
    return LAUNCH_LIBRARY + time


def shape_of(problem: Mapping[str, int | str], item: int, out: int) -> Shape:
    """The linear that a problem's fields describe."""
    op = str(problem["op"])
    gated, bias = op.endswith("gated"), bool(problem["bias"])
    return Shape(
        int(problem["M"]), int(problem["N"]), int(problem["K"]), item, out, 2 if gated else 1,
        gated or bias or op.startswith(("linear_act", "linear_add")), bias, op.startswith("norm"),
    )  # fmt: skip
