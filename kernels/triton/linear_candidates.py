"""Ways to run a linear on a CUDA target, the best by a simple model of time first.

A candidate is a flat dict. ``path`` says which kernels: ``gemv`` (few rows), ``gemv_rows`` (one row held in registers),
``skinny`` (few rows, K divided among warps), ``matmul`` (tiles), ``cublas`` or ``cutlass`` (a library call and, where something comes after the product, one more
kernel; cutlass by its instance's name). For ops that norm first, ``norm`` says whether the kernel does it itself.
Every candidate is valid for any number of rows up to the problem's.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache

from compilerllm.kernels.triton.few_rows import GEMV_ROWS, gemv, gemv_rows, skinny
from compilerllm.kernels.triton.linear_shape import (
    L2_FACTOR,
    LATENCY,
    LAUNCH,
    NORM_LAUNCH,
    SM_BYTES,
    SM_NORMED,
    Candidate,
    Shape,
    Timed,
    best,
    power_of_two,
    together,
)
from compilerllm.kernels.triton.target import CudaTarget

MOST_TILES = 24  # candidates: each takes a second to compile where all are timed
NORM_TILES = 64  # rows up to which tiles norm by themselves: each program reads its rows anew
LAUNCH_LIBRARY = 4e-6  # a library's kernel neither starts early nor lets the next one
MATMUL_SHARE, LIBRARY_SHARE = 0.92, 0.8  # of the memory's bandwidth while a kernel reads weights
TILES = (  # rows, columns, elements of K, warps
    (16, 32, 256, 4), (16, 64, 128, 4), (16, 64, 256, 4),
    (32, 32, 256, 4), (32, 64, 128, 4), (32, 64, 256, 4), (32, 128, 64, 4), (32, 128, 128, 4),
    (64, 32, 128, 4), (64, 32, 256, 4), (64, 16, 256, 4), (64, 64, 64, 4), (64, 64, 128, 4), (64, 128, 64, 4), (64, 128, 128, 4),
    (128, 64, 64, 4), (128, 64, 128, 4), (128, 128, 64, 4), (128, 128, 64, 8), (128, 256, 64, 8), (256, 128, 64, 8),
)  # fmt: skip
WIDE_TILES = ((16, 32, 32, 4), (32, 32, 32, 4), (64, 32, 32, 4), (64, 64, 32, 8))  # f32, no tensor cores


@lru_cache(maxsize=1024)  # layers are alike
def candidates(
    s: Shape, target: CudaTarget, tensor_cores: bool, cutlass: tuple[str, ...] = ()
) -> list[Candidate]:
    """A few of each path, the cost model's order; callers leave the list as it is. tensor_cores: whether they multiply the
    dtype exactly; cutlass: names of instances, which follow cuBLAS: nothing but a measurement puts one first."""
    kinds: list[list[Timed]] = []  # each the best of its kind, best first
    plain = replace(s, norm=False)
    few, one = s.m <= GEMV_ROWS, s.m == 1
    if few:
        kinds += [best(gemv(s, target), 6), best(gemv_rows(s, target), 6)]
    kinds.append(best(skinny(s, target, tensor_cores), 10))
    if s.norm and s.m <= NORM_TILES and s.wide and not one:
        inside = (f for f in _matmul(s, target, tensor_cores) if f[1]["split"] == 1)
        kinds.append([(t, c | {"norm": "inside"}) for t, c in _varied(best(inside))[:6]])
    tiles = _varied(best(_matmul(plain, target, tensor_cores)))[: MOST_TILES // (3 if few else 1)]
    library = _library_cost(s, target)
    called: list[Timed] = [(library, {"path": "cublas"})]
    called += [
        (library * (1 + 0.001 * place), {"path": "cutlass", "instance": name})
        for place, name in enumerate(cutlass, 1)
    ]
    rest = [tiles, called]
    if s.norm:
        ways = [best(skinny(plain, target, tensor_cores), 2), tiles[:10], called]
        if few:
            ways += [best(gemv(plain, target), 2), best(gemv_rows(plain, target), 1)]
        rest = [_apart(way) for way in ways]
    if one:  # none of these is ever the fastest
        return _spread(kinds) + [c for _, c in best(f for way in rest for f in way)]
    return _spread([*kinds, *rest])


def _apart(found: Sequence[Timed]) -> list[Timed]:
    """With the norm as a launch of its own before it."""
    return [(cost + NORM_LAUNCH, c | {"norm": "apart"}) for cost, c in found]


def _spread(kinds: Sequence[Sequence[Timed]]) -> list[Candidate]:
    """All by cost; but behind the first, every other place goes to the best of each kind by turns, then the second of each,
    so that what tuning has time for is not all of one kind that the model is wrong about."""
    whole = best(f for kind in kinds for f in kind)
    turns = [f for place in range(3) for f in best(f for kind in kinds for f in kind[place : place + 1])]
    taken: list[Candidate] = []
    while whole or turns:
        for queue in (whole, turns):
            while queue and queue[0][1] in taken:
                queue.pop(0)
            if queue:
                taken.append(queue.pop(0)[1])
    return taken


def _varied(found: Sequence[Timed]) -> list[Timed]:
    """At most two of each tile size (they differ in stages and splits); the best also with nothing fetched ahead."""
    count: dict[tuple[int, ...], int] = {}
    kept = []
    for place, (cost, c) in enumerate(found):
        key = c["bm"], c["bn"], c["bk"], c["warps"], c["swap"]
        count[key] = count.get(key, 0) + 1
        if count[key] <= 2:
            kept.append((cost, c))
        if place < 2 and c["ahead"]:
            kept.append((cost * 1.02, c | {"ahead": 0}))
    return sorted(kept, key=lambda f: f[0])


def _matmul(s: Shape, target: CudaTarget, tensor_cores: bool) -> Iterator[Timed]:
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
        if s.norm and bm * bk > (64 if bm >= 64 else 48) * 32 * warps:
            continue
        step_bytes = _step_bytes(s, bm, bn, bk)
        for stages in (3, 4, 6):
            if stages * step_bytes > target.shared - 4096:
                continue
            if stages == 6 and step_bytes > 24576:
                continue
            tiles = -(-s.m // bm) * -(-s.n // bn)
            steps = -(-s.k // bk)
            for split in (1, 2, 4, 8):
                few = steps < min(4, 512 // bk) * split
                if split > 1 and (few or tiles * split > 4 * target.sms or s.m > 512):
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
    step_bytes = _step_bytes(s, bm, bn, bk)
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
        time += count * together(
            wave * weights / (MATMUL_SHARE * bandwidth),
            wave * step_bytes * steps / (L2_FACTOR * bandwidth),
            on_sm * step_bytes * steps / rate,
            on_sm * bm * bk * steps / SM_NORMED if s.norm else 0.0,
            on_sm * 2 * bm * s.halves * bn * bk * steps / (peak / target.sms),
        )
        left -= count * wave
    sums = 2 * split * s.m * s.n * s.halves * 4 if split > 1 else 0
    fill = LATENCY
    if split > 1:  # arrivals counted, then the others' sums read: together if they are few
        fill += 1.2e-6 + split * (0.2e-6 if split * bm * bn * s.halves <= 32768 else 0.6e-6)
    if s.m <= 128:  # nothing else hides what one program waits for
        fill += 0.7e-6 * steps / (stages - 1)
    fill += sums / (L2_FACTOR * bandwidth) + s.m * s.n * s.out / bandwidth
    slower = 1.0
    if bm < 64 and tensor_cores and columns > 8 * target.sms:
        slower = 1.01 if swap else 1.0
    elif bm < 64 and tensor_cores and not swap:  # small instructions, and warps that read the same rows
        slower = 1.04 if bn * s.halves >= 64 else 1.2
    return (LAUNCH + fill + time) * slower


def _step_bytes(s: Shape, bm: int, bn: int, bk: int) -> int:
    """Of a step's tiles; a norm has the addend's too."""
    return (bm * (2 if s.norm else 1) + s.halves * bn) * bk * s.item


def _share(bm: int, bn: int, swap: bool, tensor_cores: bool) -> float:
    """Part of the matrix peak that tiles of this size reach."""
    if not tensor_cores:
        return 0.05
    if swap:
        return {16: 0.25, 32: 0.4}[bm]
    if bm < 64:
        return 0.25 if bm == 16 else 0.35
    return {1: 0.35, 2: 0.5, 4: 0.62, 8: 0.72}.get(bm * bn // 4096, 0.72 if bm * bn >= 32768 else 0.3)


def _library_cost(s: Shape, target: CudaTarget) -> float:
    bandwidth = target.bandwidth * 1e9
    moved = s.weight_bytes + s.m * (s.k * s.item + s.n * s.halves * s.out)
    tiles = max(1.0, 64 / max(s.m, 1))  # a tile that is mostly padding
    time = max(
        moved / (LIBRARY_SHARE * bandwidth), s.flops * tiles / (0.9 * target.tflops * 1e12),
        s.k * 1.3e-9,  # of one tile
    )  # fmt: skip
    if s.after:
        product = 4 if s.bias else s.item
        time += LAUNCH + (s.m * s.n * (s.halves * product * 2 + s.out)) / (0.9 * bandwidth)
    return LAUNCH_LIBRARY + time
