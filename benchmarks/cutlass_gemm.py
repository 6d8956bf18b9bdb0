"""CUTLASS instances against torch: is each right, and how fast beside cuBLAS, on Llama-3.1-8B's linears?

    python benchmarks/cutlass_gemm.py LIBRARY.so [--seconds 30]

Weights rotate over more than the L2 cache; a CUDA graph of a few calls is timed by events; medians. Needs an H100 or H200.
"""

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from compilerllm.kernels.launch.gpu.cutlass import CutlassLibrary

SHAPES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}  # N, K
ROWS = (16, 64, 256, 2048, 8192)
CACHE_BYTES = 160 << 20  # rotated weights together: well over the 60 MB of L2
FP8 = torch.float8_e4m3fn


def milliseconds(call: Callable[[int], object], calls: int, repeats: int = 5) -> float:
    """Median time of one call, from replays of a graph of ``calls`` of them."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        call(0)
        with torch.cuda.graph(graph, stream=stream):
            for i in range(calls):
                call(i)
        graph.replay()
        times: list[float] = []
        for _ in range(repeats):
            start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) / calls)
    return statistics.median(times)


def operand(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    made = torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16) * 0.5
    return made.to(dtype)


def activation(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    if "_silu" in name:
        return torch.nn.functional.silu
    if "_gelu_tanh" in name:
        return lambda x: torch.nn.functional.gelu(x, approximate="tanh")
    return torch.nn.functional.gelu if "_gelu" in name else lambda x: x


def plain(library: CutlassLibrary, instance: int, m: int, n: int, k: int) -> tuple[float, float]:
    """Error relative to the largest value, and the time of a call in ms."""
    name = library.names[instance]
    fp8 = "_f8e4m3_" in name
    dtype = FP8 if fp8 else torch.bfloat16
    out_type = torch.float32 if name.split("_")[2] == "f32" else torch.bfloat16
    a = operand(m, k, dtype)
    b = operand(n, k, dtype)
    c = operand(m, n, out_type) if "_residual" in name else None
    bias = torch.randn(n, device="cuda", dtype=out_type) if "_bias" in name else None
    scale = torch.full((1,), 0.25, device="cuda") if fp8 else None
    d = torch.full((m, n), float("nan"), device="cuda", dtype=out_type)
    size = library.workspace(instance, m, n, k)
    space = torch.empty(max(1, size), device="cuda", dtype=torch.uint8)
    weights = [b, *(b.clone() for _ in range(CACHE_BYTES // b.nbytes))]

    def at(tensor: torch.Tensor | None) -> int:
        return 0 if tensor is None else tensor.data_ptr()

    def call(i: int) -> None:
        library.run(
            instance, a.data_ptr(), weights[i % len(weights)].data_ptr(), at(c), at(bias), d.data_ptr(), m, n, k,
            at(scale), space.data_ptr(), size, torch.cuda.current_stream().cuda_stream,
        )  # fmt: skip

    call(0)
    checked = slice(0, 256), slice(max(0, m - 256), m)  # rows: the first and the last tiles
    error = 0.0
    for rows in checked:
        wanted = a[rows].float() @ b.float().t()
        wanted = wanted * 0.25 if fp8 else wanted
        wanted = wanted if bias is None else wanted + bias.float()
        wanted = activation(name)(wanted if c is None else wanted + c[rows].float())
        error = max(error, ((d[rows].float() - wanted).abs().max() / wanted.abs().max()).item())
    return error, milliseconds(call, max(2, min(len(weights), 8)))


def cublas(m: int, n: int, k: int, fp8: bool) -> float:
    a = operand(m, k, FP8 if fp8 else torch.bfloat16)
    b = operand(n, k, FP8 if fp8 else torch.bfloat16)
    d = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
    one = torch.ones((), device="cuda")
    weights = [b, *(b.clone() for _ in range(CACHE_BYTES // b.nbytes))]

    def call(i: int) -> None:
        w = weights[i % len(weights)].t()
        if fp8:
            torch._scaled_mm(a, w, one, one, out_dtype=torch.bfloat16, use_fast_accum=True)
        else:
            torch.mm(a, w, out=d)

    return milliseconds(call, max(2, min(len(weights), 8)))


def grouped(
    library: CutlassLibrary, instance: int, m: int, n: int, k: int, groups: int = 32
) -> tuple[float, float]:
    """As ``plain``, with rows spread unevenly over experts, the first of which has none."""
    cuts = torch.randint(0, m + 1, (groups - 2,)).sort().values.tolist()
    offsets = [0, 0, *cuts, m]
    a, d = (
        operand(m, k, torch.bfloat16),
        torch.full((m, n), float("nan"), device="cuda", dtype=torch.bfloat16),
    )
    b = operand(groups * n, k, torch.bfloat16).view(groups, n, k)
    on_device = torch.tensor(offsets, device="cuda", dtype=torch.int32)
    size = library.workspace(instance, m, n, k, groups)
    space = torch.empty(size, device="cuda", dtype=torch.uint8)

    def call(_: int) -> None:
        library.run_grouped(
            instance, a.data_ptr(), b.data_ptr(), on_device.data_ptr(), d.data_ptr(), groups, m, n, k,
            space.data_ptr(), size, torch.cuda.current_stream().cuda_stream,
        )  # fmt: skip

    call(0)
    spans = enumerate(itertools.pairwise(offsets))
    wanted = torch.cat([a[i:j].float() @ b[e].float().t() for e, (i, j) in spans])
    error = ((d.float() - wanted).abs().max() / wanted.abs().max()).item()
    return error, milliseconds(call, 4)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("library", type=Path)
    parser.add_argument(
        "--seconds", type=float, default=30.0, help="stop starting new shapes after this long"
    )
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = False
    library, results, start = CutlassLibrary(args.library.resolve()), [], time.monotonic()
    for i, name in enumerate(library.names):
        if name.startswith("grouped"):
            for m in (256, 8192):
                error, ms = grouped(library, i, m, 1536, 2048)
                results.append({"shape": "experts", "m": m, "name": name, "ms": ms, "error": error})
                print(f"experts {m:5d} {name:60s} {ms:8.4f} ms  error {error:.4f}", flush=True)
    skipped = 0
    for m in ROWS:
        for shape, (n, k) in SHAPES.items():
            if time.monotonic() - start > args.seconds:
                skipped += 1
                continue
            peers = {fp8: cublas(m, n, k, fp8) for fp8 in (False, True)}
            for i, name in enumerate(library.names):
                if name.startswith("grouped"):
                    continue
                error, ms = plain(library, i, m, n, k)
                peer, tflops = peers["_f8e4m3_" in name], 2e-9 * m * n * k / ms
                results.append(
                    {"shape": shape, "m": m, "name": name, "ms": ms, "torch_ms": peer, "error": error}
                )
                print(
                    f"{shape:7s} {m:5d} {name:60s} {ms:8.4f} ms {tflops:6.0f} TFLOP/s  torch {peer:8.4f}"
                    f"  x{peer / ms:.2f}  error {error:.4f}{'  WRONG' if not error < 0.01 else ''}", flush=True,
                )  # fmt: skip
    print(json.dumps({"device": torch.cuda.get_device_name(), "skipped": skipped, "results": results}))


if __name__ == "__main__":
    main()
