"""Time every candidate kernel of a model's shapes on this GPU, and merge the figures into a file of tuning data.

Later builds for the same chip pick the fastest. Without --output the file lies in the cache and is used by this user's
builds; figures of several machines and models merge. With --in-step, whole steps are timed, with each of the candidates
whose own figures are close: what a kernel does to its neighbours counts too, and decides.

compilerllm tune meta-llama/Llama-3.1-8B --tokens 1,8,64
compilerllm tune meta-llama/Llama-3.1-8B --in-step --sequences 1,8,64      after the first
"""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from compilerllm.errors import CompilerLLMError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

    from compilerllm.kernels.triton.target import CudaTarget
    from compilerllm.kernels.tuning import TuningData

DECODE = "1,2,4,8,16,32,64,128,256,512"
MIXED = "512,2048,8192"
MOST_CANDIDATES, MOST_RIVALS = 12, 6  # of a problem by themselves, and in whole steps


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", metavar="MODEL", help="A folder, a hub id or a .gguf file; weights are not read."
    )
    parser.add_argument("--sequences", default=DECODE, help=f"Decode steps to time, by sequences. [{DECODE}]")
    parser.add_argument("--tokens", default=MIXED, help=f"Steps with prompts to time, by tokens. [{MIXED}]")
    parser.add_argument(
        "--families", default="", help="Only these kernel families, such as linear,decode. [all]"
    )
    parser.add_argument(
        "--candidates",
        type=int,
        help=f"Candidates of a problem, the most promising first. [{MOST_CANDIDATES}; in steps {MOST_RIVALS}]",
    )
    parser.add_argument(
        "--in-step", action="store_true", help="Time whole steps with candidates that have figures already."
    )
    parser.add_argument("--dtype", default="auto", help="As for serve. [auto]")
    parser.add_argument("--output", type=Path, help="File to merge into. [the cache's]")
    parser.add_argument("--milliseconds", type=float, default=20.0, help="Time spent on a candidate. [20]")


def run(args: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.progress import Progress

    from compilerllm.kernels.triton.target import find_cuda_target
    from compilerllm.measuring import merge_into, tuning_file
    from compilerllm.targets import target_name

    if args.candidates is not None and args.candidates < 1:
        raise CompilerLLMError(f"--candidates must be at least 1, but is {args.candidates}")
    target = find_cuda_target(target_name("cuda"))
    path = args.output or tuning_file(target.chip)
    with Progress(console=Console(stderr=True), transient=True) as bar:
        data, lines = (_time_steps if args.in_step else _time_kernels)(args, target, bar)
    merge_into(path, data)
    print("\n".join(lines))
    print(f"merged into {path}")
    return 0


def _time_kernels(
    args: argparse.Namespace, target: "CudaTarget", bar: "Progress"
) -> tuple["TuningData", list[str]]:
    """Each candidate by itself; a line for each problem's fastest."""
    from compilerllm.checkpoint import locate
    from compilerllm.environment import cache_dir
    from compilerllm.ir.step import Bucket
    from compilerllm.kernels.cutlass.build import find_supply
    from compilerllm.kernels.cutlass.instances import TARGET
    from compilerllm.kernels.triton.emit import cutlass_cache
    from compilerllm.measuring import find_problems, time_problems
    from compilerllm.models.model import capture_checkpoint
    from compilerllm.models.resolve import resolve
    from compilerllm.passes.pipeline import Options, run_pipeline

    sequences, tokens = _numbers("--sequences", args.sequences), _numbers("--tokens", args.tokens)
    checkpoint = resolve(str(locate(args.model)), dtype=args.dtype, load_format="dummy")
    module, _ = run_pipeline(capture_checkpoint(checkpoint).module, Options(level=3, target=target.name))
    buckets = [Bucket(s, s, s, 1) for s in sequences] + [Bucket(t, min(t, 16), min(t, 16), t) for t in tokens]
    cutlass, families = find_supply(cutlass_cache(cache_dir() / "kernels")), _families(args)
    tasks = [
        t for t in find_problems(module, target, buckets, cutlass) if not families or t.family in families
    ]
    if cutlass.reason and target.name == TARGET:
        kept = f"those of the cache's library are timed ({len(cutlass.kept)})" if cutlass.kept else "left out"
        _show(bar.console, f"CUTLASS candidates: {kept}: {cutlass.reason}")
    line = bar.add_task("", total=None)

    def on_measure(done: int, total: int, what: str) -> None:
        if what.startswith("left out"):
            _show(bar.console, what)
        bar.update(line, completed=done, total=total, description=what[:60])

    most = args.candidates or MOST_CANDIDATES
    data = time_problems(tasks, target, cutlass, most, args.milliseconds / 1e3, on_measure)
    return data, [
        f"{family:<12} {key}: {timed[0]['us']:.1f} us  {timed[0]['config']}"
        for family, problems in sorted(data.entries.items())
        for key, timed in sorted(problems.items())
        if timed
    ]


def _time_steps(
    args: argparse.Namespace, target: "CudaTarget", bar: "Progress"
) -> tuple["TuningData", list[str]]:
    """Whole steps; a line for each and what changed in it."""
    from compilerllm.step_tuning import Wanted, time_steps

    wanted = Wanted(
        args.model, args.dtype, _numbers("--sequences", args.sequences), _numbers("--tokens", args.tokens),
        args.candidates or MOST_RIVALS, _families(args),
    )  # fmt: skip
    line = bar.add_task("building", total=None)

    def on_try(done: int, total: int, what: str) -> None:
        bar.update(line, completed=done, total=total, description=what[:60])

    return time_steps(wanted, target, on_try)


def _families(args: argparse.Namespace) -> frozenset[str]:
    return frozenset(filter(None, args.families.split(",")))


def _show(console: "Console", line: str) -> None:
    console.print(line, highlight=False, soft_wrap=True)


def _numbers(flag: str, text: str) -> list[int]:
    try:
        found = [int(part) for part in text.split(",") if part]
    except ValueError:
        found = [0]
    if any(n < 1 for n in found):
        raise CompilerLLMError(f"{flag} takes whole numbers above 0, separated by commas, not {text!r}.")
    return found
