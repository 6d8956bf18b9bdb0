"""Micro benchmark of the CPU kernel templates, beside what the machine gives.

Shapes are SmolLM2-135M's (hidden 576, 9 query and 3 kv heads of 64, 30 layers, 49,152 words). Each linear walks through
the weights of all layers, so that nothing is warm that would not be in a real step. Floors measured in the same run: a
read of the same bytes by the same threads, and torch's bf16 matmul of 2048 cubed. Best of several rounds.

    python benchmarks/cpu_kernels.py [--threads 2] [--rounds 5] [--quick]

Prints a table, then one line of JSON.
"""

import argparse
import ctypes
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the calls are the tests' own

from tests.kernels.cpu import attention as attn
from tests.kernels.cpu import linear as lib
from tests.kernels.cpu.library import TARGETS, address, build

LAYERS = 30
# name, N (packed rows), K, epilogue
LINEARS = [
    ("qkv", 960, 576, lib.STORE),
    ("out", 576, 576, lib.RESIDUAL),
    ("gate_up", 3072, 576, lib.GATED),
    ("down", 576, 1536, lib.RESIDUAL),
]
HEAD = (49152, 576)
LAYOUTS = {"bf16": lib.N16K2, "q4_1": lib.Q4_1, "q8_0": lib.Q8_0, "f32": lib.N16}


def best(call: Callable[[], None], rounds: int) -> float:
    """Seconds of the fastest round."""
    seconds = []
    for _ in range(rounds):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


class Bench:
    def __init__(self, target: str, threads: int, rounds: int) -> None:
        self.target, self.threads, self.rounds = target, threads, rounds
        self.rows: list[dict[str, object]] = []
        self.library = build("linear_lib.cpp", target)

    def report(self, name: str, seconds: float, moved: float, flops: float, floor: float) -> None:
        row = {
            "name": name,
            "ms": round(seconds * 1e3, 3),
            "GB/s": round(moved / seconds / 1e9, 1),
            "GFLOP/s": round(flops / seconds / 1e9, 1),
            "floor_ms": round(floor * 1e3, 3),
        }
        self.rows.append(row)
        print(
            f"{name:32} {row['ms']:>10} ms {row['GB/s']:>8} GB/s {row['GFLOP/s']:>9} GFLOP/s   floor {row['floor_ms']:>8} ms"
        )

    def read(self, memory: torch.Tensor) -> float:
        size = ctypes.c_size_t(memory.numel())
        return best(lambda: self.library.read_memory(self.threads, address(memory), size), self.rounds)

    def linear(
        self,
        layout: int,
        dtype: torch.dtype,
        T: int,
        n: int,
        k: int,
        epilogue: int,
        weights: torch.Tensor,
        size: int,
        layers: int,
    ) -> Callable[[], None]:
        x = torch.randn(T, k).to(dtype)
        y = torch.zeros(T, n, dtype=torch.float32 if epilogue == lib.FLOAT else dtype)

        def call() -> None:
            lib.run(self.target, layout, x, weights, n, y, epilogue=epilogue, residual=y, threads=self.threads, repeats=layers,
                    w_stride=size)  # fmt: skip

        return call

    def chain(self, name: str, T: int, peak: float) -> None:
        """All linears of the model (the head for few rows only) on T tokens."""
        layout = LAYOUTS[name]
        dtype = torch.float32 if name == "f32" else torch.bfloat16
        sizes = [lib.packed_size(self.library, layout, n, k) for _, n, k, _ in LINEARS]
        head = lib.packed_size(self.library, layout, *HEAD) if T <= 64 else 0
        memory = lib.aligned(LAYERS * sum(sizes) + head).zero_()
        calls: list[Callable[[], None]] = []
        flops, at = 0.0, 0
        for (_, n, k, epilogue), size in zip(LINEARS, sizes, strict=True):
            calls.append(
                self.linear(layout, dtype, T, n, k, epilogue, memory[at : at + LAYERS * size], size, LAYERS)
            )
            at += LAYERS * size
            flops += 2.0 * T * n * k * LAYERS
        if head:
            calls.append(self.linear(layout, dtype, T, *HEAD, lib.FLOAT, memory[at:], head, 1))
            flops += 2.0 * T * HEAD[0] * HEAD[1]

        def step() -> None:
            for call in calls:
                call()

        seconds = best(step, self.rounds)
        floor = max(self.read(memory), flops / peak if dtype == torch.bfloat16 else 0.0)
        self.report(f"linears {name} T={T}", seconds, memory.numel(), flops, floor)

    def attention(self, name: str, lengths: list[tuple[int, int]], dtype: torch.dtype, peak: float) -> None:
        shape = attn.Shape(9, 3, 64)
        batch = attn.Sequences(lengths)
        tables = batch.tables(torch.Generator().manual_seed(0))
        machine = attn.Machine(self.target, shape, dtype, int(tables.max()) + 1, self.threads)
        machine.cache.zero_()
        lens = torch.tensor([total for _, total in lengths], dtype=torch.int32)
        q = torch.randn(batch.tokens, shape.H * shape.D).to(dtype)
        out, starts = torch.empty_like(q), batch.starts()
        seconds = best(lambda: machine.attend(q, out, starts, lens, tables, repeats=LAYERS), self.rounds)
        pairs = sum(n * total - n * (n - 1) / 2 for n, total in lengths)
        flops = 4.0 * pairs * shape.H * shape.D * LAYERS
        moved = float(machine.cache.numel()) * LAYERS
        floor = max(self.read(machine.cache) * LAYERS, flops / peak if dtype == torch.bfloat16 else 0.0)
        self.report(f"attention {name}", seconds, moved, flops, floor)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="batch 1 and one long prompt only")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    bench = Bench(TARGETS[0], args.threads, args.rounds)
    memory = torch.ones(256 << 20, dtype=torch.uint8)
    read = memory.numel() / bench.read(memory)
    square = torch.ones(2048, 2048, dtype=torch.bfloat16)
    peak = 2.0 * 2048**3 / best(lambda: torch.mm(square, square), args.rounds)
    load = os.getloadavg()[0]
    print(
        f"target {TARGETS[0]}, {args.threads} threads, load {load:.1f}: read {read / 1e9:.1f} GB/s, torch bf16 {peak / 1e9:.0f} GFLOP/s"
    )
    for name in LAYOUTS:
        for T in (1,) if args.quick else (1, 8, 32, 48):
            bench.chain(name, T, peak)
    bench.chain("bf16", 1900, peak)
    bench.chain("q4_1", 1900, peak)
    bench.attention("prefill 1900 bf16", [(1900, 1900)], torch.bfloat16, peak)
    bench.attention("decode 1 at 256 bf16", [(1, 256)], torch.bfloat16, peak)
    if not args.quick:
        bench.attention("decode 32 at 256 bf16", [(1, 256)] * 32, torch.bfloat16, peak)
        bench.attention("decode 1 at 1900 bf16", [(1, 1900)], torch.bfloat16, peak)
    print(
        json.dumps(
            {
                "benchmark": "cpu_kernels",
                "target": TARGETS[0],
                "threads": args.threads,
                "load_average": round(load, 2),
                "read_GB/s": round(read / 1e9, 1),
                "torch_bf16_GFLOP/s": round(peak / 1e9),
                "rows": bench.rows,
            }
        )
    )


if __name__ == "__main__":
    main()
