"""Say what a build did with a model, and why: every kernel of every bucket with the nodes and modules it came from, the
passes that made it, why this candidate was chosen, what it must move and compute, and how long that takes.

  compilerllm explain model.gguf                             as it runs on this machine
  compilerllm explain Qwen/Qwen3-0.6B --target sm_90         on a GPU that need not be here
  compilerllm explain ARTIFACT --html report.html            an artifact, bundle or packed file; one page
  compilerllm explain model.gguf --bucket decode-1 --bucket mixed-256
  compilerllm explain model.gguf --query-len 512 --measure   a prompt of 512 tokens, timed kernel by kernel

"bound" is the roofline: no kernel can be faster. "predicted" is what the kernel is expected to take. Measuring needs the
target's own machine. The model is built if the cache has no artifact of it.
"""

import argparse
import json
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from compilerllm.cli.bench_flags import whole_number
from compilerllm.cli.flags import UsageError, add_engine_flags, read_engine_config
from compilerllm.errors import CompilerLLMError

if TYPE_CHECKING:
    from compilerllm.explain.collect import Look
    from compilerllm.explain.report import Report


class ReportNotWritten(CompilerLLMError):
    """The file that was asked for cannot be written."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", nargs="?", metavar="MODEL|ARTIFACT",
        help="A folder, a hub id, a .gguf file, or an artifact, bundle or packed file; by default the demo's model.",
    )  # fmt: skip
    parser.add_argument(
        "--target", metavar="NAME", help="Such as sm_90 or cpu; by default for --device of this machine."
    )
    parser.add_argument(
        "--from-config", action="store_true", help="Build from the configuration only: the weights need not be there."
    )  # fmt: skip
    parser.add_argument(
        "--bucket", action="append", default=[], metavar="NAME",
        help="Only this bucket, such as decode-8 or mixed-512; may be repeated. decode, mixed and sampling are all of a kind.",
    )  # fmt: skip
    parser.add_argument(
        "--batch-size", type=whole_number, metavar="N", help="Look at one step of N sequences, whatever bucket holds it."
    )  # fmt: skip
    parser.add_argument(
        "--query-len", type=whole_number, metavar="N", help="Tokens of each sequence of that step; 1 is a decode step."
    )  # fmt: skip
    parser.add_argument(
        "--context", type=whole_number, metavar="N", help="Tokens that each sequence attends to; 256 in decode steps."
    )  # fmt: skip
    parser.add_argument("--measure", action="store_true", help="Run the step and time every kernel.")
    parser.add_argument(
        "--checkpoint", metavar="MODEL", help="Where an ARTIFACT's weights are, for --measure."
    )
    parser.add_argument(
        "--bandwidth", type=_positive, metavar="GB/S", help="Of the machine, in place of what is known or measured."
    )  # fmt: skip
    parser.add_argument("--tflops", type=_positive, metavar="TFLOP/S", help="Of its matrix units, likewise.")
    parser.add_argument("--json", type=Path, metavar="FILE", help="Write the report as JSON (docs/explain.md).")  # fmt: skip
    parser.add_argument("--html", type=Path, metavar="FILE", help="Write it as one self-contained page.")
    add_engine_flags(parser, ("served_model_name",))


def run(args: argparse.Namespace) -> int:
    from compilerllm.explain.collect import collect
    from compilerllm.explain.measure import measure, prediction_errors
    from compilerllm.explain.text import render, render_errors

    if args.measure and args.from_config:
        raise UsageError("--measure runs the model, which --from-config has no weights for: leave one out.")
    look = read_look(args)
    config = read_engine_config(args)
    artifact, place, name = _open(args, config.model.model)
    with _progress("explaining") as show:
        collected = collect(artifact, name, look, lambda done, total: show(done, total, "buckets"))
    report, detailed = collected.report, list(args.bucket)
    if look.step is not None:
        detailed = [c.name for c in collected.chosen]
    if args.measure:
        from compilerllm.explain.text import ends

        with _progress("measuring") as show:
            report = measure(collected, artifact, place, () if detailed else ends(report), show)
    _write(args, report)
    print(render(report, shutil.get_terminal_size((100, 40)).columns, detailed))
    if args.measure:
        print("\n" + render_errors(prediction_errors(report)))
    return 0


def read_look(args: argparse.Namespace) -> "Look":
    """What the flags ask to see. Raises ``UsageError`` for flags that exclude each other."""
    from compilerllm.explain.collect import Look
    from compilerllm.explain.steps import CONTEXT, Step

    step = None
    if args.batch_size or args.query_len:
        if args.bucket:
            raise UsageError(
                "--batch-size and --query-len say the step, from which the bucket follows: leave out --bucket."
            )
        query = args.query_len or 1
        context = args.context or max(query, CONTEXT if query == 1 else 0)
        if context < query:
            raise UsageError(f"--context {context} is shorter than --query-len {query}, which it includes.")
        step = Step(args.batch_size or 1, query, context)
    return Look(tuple(args.bucket), args.context, step, args.bandwidth, args.tflops)


def _open(args: argparse.Namespace, model: str) -> tuple[Path, Path, str]:
    """The artifact's folder, where its weights are, and what to call it. Raises what finding and building them raises."""
    from compilerllm.artifact import read_manifest
    from compilerllm.bundle import is_artifact, open_artifact
    from compilerllm.checkpoint import locate
    from compilerllm.cli.local import compile_model

    path = Path(model).expanduser()
    if not is_artifact(path):
        config = read_engine_config(args)
        found = compile_model(config, args.target, from_config=args.from_config)
        return found.path, locate(model), config.model.display_name
    if args.measure and not args.checkpoint:
        raise UsageError("--measure needs the weights of an artifact: say where they are with --checkpoint MODEL.")  # fmt: skip
    place = locate(args.checkpoint) if args.checkpoint else path
    folder = open_artifact(path, args.target, to_run=False)
    facts = (read_manifest(folder) or {}).get("facts", {})
    return folder, place, str(facts.get("name") or facts.get("architecture") or path.name)


def _write(args: argparse.Namespace, report: "Report") -> None:
    if args.json is not None:
        try:
            args.json.write_text(json.dumps(report.to_json()) + "\n", encoding="utf-8")
        except OSError as error:
            raise ReportNotWritten(
                f"cannot write the report {args.json}: {error.strerror or error}. Give another file to --json."
            ) from error
    if args.html is not None:
        from compilerllm.explain.page import write_page

        write_page(report, args.html)


def _positive(text: str) -> float:
    """An argparse type: a number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no number above 0")
    return value


@contextmanager
def _progress(what: str) -> Iterator[Callable[[int, int, str], None]]:
    """A bar on a terminal; silent elsewhere."""
    if not sys.stderr.isatty():
        yield lambda done, total, name: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total, name: bar.update(
            task, completed=done, total=total, description=f"{what}: {name}" if name else what
        )
