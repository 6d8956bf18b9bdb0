"""Find what makes a compiled model wrong: the pass, or the node, kernel and shape.

The optimized model and the unoptimized one (level 0) compute the logits of the same two sequences: prompts in one step, a
prompt beside a decode, then decodes. Both are compared with float32, in which nothing is rounded. If the optimized one errs
more than the unoptimized one by its own rounding, passes are left out and kernels run alone until one is found at fault.

compilerllm bisect model.gguf
compilerllm bisect Qwen/Qwen3-0.6B --prompt "The text that gave wrong tokens, with what followed it"
compilerllm bisect model/ --target sm_90 --json report.json      without a GPU its kernels are interpreted, which is slow
compilerllm bisect bundle/ --checkpoint model/                   an artifact, bundle or packed file, as it was built
compilerllm bisect model/ --every-node                           look at each kernel, even where the logits are right

Exit status: 0 the model is right, 3 something is wrong, 1 it could not be compared.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compilerllm.cli.flags import UsageError
from compilerllm.errors import InvalidParameter

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from compilerllm.bisect.subject import Subject
    from compilerllm.compiler import CompileRequest

WRONG = 3  # exit status


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        metavar="MODEL|ARTIFACT",
        help="A folder, a hub id, a .gguf file, or an artifact, bundle or packed file.",
    )
    parser.add_argument("--checkpoint", metavar="MODEL", help="Where an ARTIFACT's weights are.")
    parser.add_argument(
        "--target",
        metavar="NAME",
        help="Such as sm_90 or cpu; by default this machine's GPU, or else its CPU.",
    )
    parser.add_argument(
        "--optimization-level",
        type=int,
        default=2,
        choices=range(4),
        help="The level that is compared with level 0.",
    )
    parser.add_argument("--dtype", default="auto", help="Type of weights and activations.")
    parser.add_argument(
        "--weights",
        default="auto",
        choices=("auto", "packed", "dense"),
        help="Block-quantised weights, as in serve.",
    )
    parser.add_argument(
        "--prompt", metavar="TEXT", help="The text to compare over; without it a text of ours."
    )
    parser.add_argument(
        "--token-ids", metavar="N,N,...", help="The same as token ids, where there is no tokenizer."
    )
    parser.add_argument(
        "--skip-passes", default="", metavar="A,B", help="Leave these passes out of the optimized model."
    )
    parser.add_argument(
        "--every-node", action="store_true", help="Check each kernel alone even where the logits are right."
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="Also write the report as JSON.")


def run(args: argparse.Namespace) -> int:
    import tempfile

    from compilerllm.bisect.opening import make_workload, open_program, open_subject
    from compilerllm.bisect.search import Search
    from compilerllm.bundle import is_artifact, open_artifact
    from compilerllm.checkpoint import locate
    from compilerllm.passes.pipeline import Options, passes_for

    found = Path(args.model).expanduser()
    built = is_artifact(found)
    if built and args.checkpoint is None:
        raise UsageError("An artifact has no weights in it: say where they are with --checkpoint MODEL.")
    place = locate(args.checkpoint if built else args.model)
    skip = tuple(sorted({name for name in args.skip_passes.split(",") if name}))
    passes_for(
        Options(level=args.optimization_level, skip=frozenset(skip))
    )  # unknown names, told before any work
    if args.json is not None and not args.json.parent.is_dir():
        raise InvalidParameter(f"Cannot write --json {args.json}: {args.json.parent} is no folder.")
    request = _request(args, skip)
    artifact = open_artifact(found, args.target) if built else _artifact(request, place)
    with _progress() as tell, tempfile.TemporaryDirectory() as scratch:
        tell("capture")
        subject = open_subject(request, place, artifact)
        work = make_workload(subject, args.prompt, args.token_ids, _encoder(subject, Path(scratch)))
        program = open_program(subject, Path(scratch))
        report = Search(subject, program, work, tell).run(every_node=args.every_node)
    print(report.text())
    if args.json is not None:
        try:
            args.json.write_text(json.dumps(report.to_json(), indent=1) + "\n")
        except OSError as error:
            raise InvalidParameter(f"Cannot write --json {args.json}: {error.strerror or error}.") from error
    return 0 if report.right else WRONG


def _request(args: argparse.Namespace, skip: tuple[str, ...]) -> "CompileRequest":
    from compilerllm.compiler import CompileRequest
    from compilerllm.targets import target_name

    return CompileRequest(
        model=args.model, dtype=args.dtype, weights=args.weights, level=args.optimization_level, target=args.target or target_name("auto"),
        skip_passes=skip,
    )  # fmt: skip


def _artifact(request: "CompileRequest", place: Path) -> Path | None:
    """What serving would run, found or built; None for a GPU that is not here, whose kernels are interpreted from source."""
    from compilerllm.cli.terminal import compile_progress
    from compilerllm.compiler import ensure_artifact
    from compilerllm.targets import is_cuda

    if is_cuda(request.target):
        return None
    with compile_progress() as on_stage:
        return ensure_artifact(request, place, on_stage).path


def _encoder(subject: "Subject", scratch: Path) -> "Callable[[str], Sequence[int]] | None":
    """The checkpoint's tokenizer; None where it has none."""
    from compilerllm.models.resolve import resolve
    from compilerllm.models.tokenizer import export_tokenizer
    from compilerllm.text.tokenizer import Tokenizer

    folder = scratch / "tokenizer"
    assert subject.place is not None
    if not export_tokenizer(resolve(str(subject.place)), folder):
        return None
    tokenizer = Tokenizer(folder)
    return lambda text: tokenizer.encode(text)


@contextmanager
def _progress() -> "Iterator[Callable[[str], None]]":
    """A callback that shows what is being done: a moving bar on a terminal, else a line each."""
    if not sys.stderr.isatty():
        yield lambda text: print(f"bisecting: {text}", file=sys.stderr, flush=True)
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns: tuple[Any, ...] = (
        TextColumn("bisecting"), BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn(),
    )  # fmt: skip
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda text: bar.update(task, description=text)
