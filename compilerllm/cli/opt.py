"""Run passes over a graph and print it. Reports go to standard error: what matched, and what nearly did and why not.

compilerllm opt graph.ir --passes canonicalise,fuse_add_norm
compilerllm opt model.gguf --optimization-level 1 --dump-ir steps/
compilerllm opt model.gguf --verify
"""

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from compilerllm.errors import InvalidParameter

if TYPE_CHECKING:
    from compilerllm.ir.graph import Module
    from compilerllm.passes.pipeline import Options, Pass
    from compilerllm.passes.report import PassReport
    from compilerllm.validation.rewrites import Finding


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source", metavar="FILE|MODEL", help="A .ir file, or a model (folder, hub id, .gguf file)."
    )
    parser.add_argument(
        "--optimization-level",
        type=int,
        default=2,
        choices=range(4),
        help="Run the pipeline's passes of this level.",
    )
    parser.add_argument(
        "--passes", metavar="A,B", help="Run these passes in this order instead of the pipeline."
    )
    parser.add_argument(
        "--skip", default="", metavar="A,B", help="Leave these passes of the pipeline out, to bisect."
    )
    parser.add_argument(
        "--dump-ir", type=Path, metavar="DIR", help="Write the IR after each pass that changed something."
    )
    parser.add_argument(
        "--no-serve", action="store_true", help="The graph is no language model: leave the serve phase out."
    )
    parser.add_argument(
        "--verify",
        action="store_true",
        help="Run the graph before and after each pass on made-up inputs (a large model made small), and compare.",
    )
    parser.add_argument("--dtype", default="auto", help="Type of weights and activations of a MODEL.")


def run(args: argparse.Namespace) -> int:
    from compilerllm.ir.text import print_module
    from compilerllm.passes.pipeline import Options, find_pass, run_pipeline

    module = captured = _load(args.source, args.dtype)
    options = Options(
        level=args.optimization_level,
        serve=not args.no_serve,
        skip=frozenset(name for name in args.skip.split(",") if name),
        verify=True,
        dump_ir=args.dump_ir,
    )
    passes = None if args.passes is None else [find_pass(name) for name in args.passes.split(",")]
    try:
        module, reports = run_pipeline(module, options, passes=passes)
    except OSError as error:  # passes read and write nothing else
        reason = error.strerror or error
        raise InvalidParameter(
            f"Cannot write --dump-ir {args.dump_ir}: {reason}. Give another folder."
        ) from error
    print(print_module(module))
    _print_reports(reports)
    if args.verify:
        _verify(captured, options, passes)
    return 0


def _verify(module: "Module", options: "Options", passes: "list[Pass] | None") -> None:
    """A line for each pass that changed something. Raises ``RewriteInvalid`` where one is wrong."""
    from compilerllm.validation.rewrites import require_valid, verify_pipeline
    from compilerllm.validation.shrink import small_enough

    def tell(entry: "Pass", found: "list[Finding]") -> None:
        print(f"{entry.name}: {'INVALID' if found else 'valid'}", file=sys.stderr)

    options = replace(options, dump_ir=None)
    require_valid(verify_pipeline(small_enough(module), options, tell, passes=passes))


def _load(source: str, dtype: str) -> "Module":
    if source.endswith(".ir"):
        from compilerllm.ir.text import parse_module

        try:
            return parse_module(Path(source).read_text(encoding="utf-8"), source)
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidParameter(f"Cannot read {source}: {error}") from error
    from compilerllm.checkpoint import locate
    from compilerllm.models.model import capture_checkpoint
    from compilerllm.models.resolve import resolve

    return capture_checkpoint(resolve(str(locate(source)), dtype=dtype), keep_packed=True).module


def _print_reports(reports: "list[PassReport]") -> None:
    for report in reports:
        if not report.matches and not report.near_misses:
            continue
        counts = "".join(f", {number} {what}" for what, number in report.counts.items())
        where = f" @{report.function}" if report.function else ""
        print(f"{report.name}{where}: {report.matches} matches{counts}", file=sys.stderr)
        for miss in report.near_misses:
            print(f"  not at {miss}", file=sys.stderr)
