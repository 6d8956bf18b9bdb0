"""Where a step's time goes, kernel by kernel, beside what the device could do.

  compilerllm bench kernels MODEL --batch-size 8 --context 256
  compilerllm bench kernels MODEL --device cuda --query-len 8000 --context 8000 --max-num-batched-tokens 8192

On a GPU each kernel is timed alone, in a step at its own size; the step's own time is below the sum where kernels overlap.
On a CPU the program is built once more with a clock read after every stage; the sum is the step's time. Launches is how
often the step runs a kernel, us of one launch; GB/s and TFLOP/s are of the bytes and operations that cannot be avoided, on
a GPU at the size of the step's bucket. "Of peak" is the larger share of the two measured peaks. `compilerllm explain
--measure` says more of every kernel.
"""

import argparse
from typing import TYPE_CHECKING, Any

from compilerllm.cli.bench_flags import add_common_flags, open_quietly, whole_number
from compilerllm.errors import CompilerLLMError

if TYPE_CHECKING:
    from compilerllm.benchmark import KernelTimer
    from compilerllm.llm import LLM


class NoKernelTimer(CompilerLLMError):
    """The model's target cannot time its kernels one by one."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--batch-size", type=whole_number, default=1, metavar="N", help="Sequences of the step."
    )
    parser.add_argument(
        "--query-len", type=whole_number, default=1, metavar="N", help="Tokens of each; 1 is a decode step."
    )
    parser.add_argument(
        "--context", type=whole_number, default=256, metavar="N", help="Tokens each sequence attends to."
    )
    add_common_flags(parser)


def run(args: argparse.Namespace) -> int:
    from compilerllm.benchmark import describe, print_table, write_record

    _, llm = open_quietly(args)
    with llm:
        model = _timer(llm)
        times = model.time_kernels(args.batch_size, args.query_len, args.context)
        rows = [
            entry(
                t.kernel, t.node, t.launches, t.microseconds, t.nbytes, t.flops,
                model.peak_bandwidth, model.peak_tflops,
            )
            for t in times
        ]  # fmt: skip
        record = describe(llm, "kernels") | {
            "batch": args.batch_size, "query": args.query_len, "context": args.context,
            "peak_gb_per_second": model.peak_bandwidth, "peak_tflops": model.peak_tflops,
        }  # fmt: skip
    rows.sort(key=lambda r: -r["launches"] * r["us"])
    total = sum(r["launches"] * r["us"] for r in rows)
    print_table(
        ("kernel", "node", "launches", "us", "us a step", "% of sum", "GB/s", "TFLOP/s", "of peak"),
        [
            (
                r["kernel"], r["node"], str(r["launches"]), f"{r['us']:.2f}", f"{r['launches'] * r['us']:.1f}",
                f"{100 * r['launches'] * r['us'] / total:.1f}" if total else "-",
                *(f"{r[n]:.1f}" if r[n] else "-" for n in ("gb_per_second", "tflops")),
                f"{100 * r['share_of_peak']:.0f}%" if r["share_of_peak"] else "-",
            )
            for r in rows
        ],
    )  # fmt: skip
    print(f"sum of all launches: {total / 1e3:.3f} ms a step")
    write_record(record | {"sum_ms": round(total / 1e3, 4), "kernels": rows}, args.output)
    return 0


def _timer(llm: "LLM") -> "KernelTimer":
    """What times the model's kernels. Raises ``NoKernelTimer``."""
    from compilerllm.benchmark import KernelTimer
    from compilerllm.compiled import CompiledModel

    if isinstance(llm.model, CompiledModel):
        from compilerllm.explain.cpu_timer import CpuKernelTimer

        return CpuKernelTimer(llm.model, llm.model.folder)
    if isinstance(llm.model, KernelTimer):
        return llm.model
    raise NoKernelTimer(
        f"{llm.engine.ready.target} at level 0 runs torch's operators one by one and no kernels of ours: take level 1 or "
        "above. `compilerllm bench latency` times the step."
    )


def entry(
    kernel: str,
    node: str,
    launches: int,
    us: float,
    nbytes: float,
    flops: float,
    bandwidth: float,
    tflops: float,
) -> dict[str, Any]:
    """One kernel's line: rates, and the larger share of the peaks (GB/s and TFLOP/s)."""
    rate, speed = (nbytes / us / 1e3, flops / us / 1e6) if us else (0.0, 0.0)
    share = max(rate / bandwidth if bandwidth else 0.0, speed / tflops if tflops else 0.0)
    return {
        "kernel": kernel, "node": node, "launches": launches, "us": round(us, 3), "gb_per_second": round(rate, 1),
        "tflops": round(speed, 2), "share_of_peak": round(share, 4),
    }  # fmt: skip
