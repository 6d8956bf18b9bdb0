"""Say what moved between two builds or two benchmark results, by how much, and whether it is beyond noise.

  compilerllm diff OLD.cllm NEW.cllm                            artifacts, bundles or packed files
  compilerllm diff model.gguf model.gguf --old "--optimization-level 1" --new "--optimization-level 3"
  compilerllm diff model.gguf model.gguf --new "--skip-passes fuse_qkv"
  compilerllm diff old.json new.json                            reports of `explain --measure --json`: kernel by kernel
  compilerllm diff old.jsonl new.jsonl --fail-above 3%          results of `bench --output`
  compilerllm diff h200.jsonl@89a2e84 h200.jsonl@de77081        lines of one commit each

Intervals are of 95%, by a bootstrap over the samples that the results have. Exit status: 0 no regression, 1 a figure is
worse by more than --fail-above and its whole interval on the worse side, 2 a command line that does not parse or two
things that cannot be compared.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compilerllm.cli.flags import UsageError

if TYPE_CHECKING:
    from compilerllm.diff.builds import BuildDiff
    from compilerllm.diff.results import Moved


def add_arguments(parser: argparse.ArgumentParser) -> None:
    for name in ("old", "new"):
        parser.add_argument(
            name,
            metavar=name.upper(),
            help="An artifact, a model, a report's JSON, or results (FILE or FILE@COMMIT).",
        )
    parser.add_argument(
        "--old", dest="old_flags", default="", metavar="FLAGS",
        help="How OLD is built where it is a model, as one text: --optimization-level, --target, --skip-passes ...",
    )  # fmt: skip
    parser.add_argument("--new", dest="new_flags", default="", metavar="FLAGS", help="The same for NEW.")
    parser.add_argument(
        "--bucket",
        action="append",
        default=[],
        metavar="NAME",
        help="Only this bucket, such as decode-8; may be repeated.",
    )
    parser.add_argument(
        "--fail-above", type=share, default=0.03, metavar="P",
        help="A regression is worse by more than this, such as 3%%, and beyond its interval. (default: 3%%)",
    )  # fmt: skip
    parser.add_argument(
        "--ir", action="store_true", help="Show all of the graphs' differences, not their first lines."
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="Write everything as JSON.")


def run(args: argparse.Namespace) -> int:
    from compilerllm.cli.diff_text import show_results
    from compilerllm.diff.results import ResultsInvalid, compare_results
    from compilerllm.diff.sides import CannotDiff, open_side, require_alike

    buckets = tuple(args.bucket)
    try:
        old = open_side(args.old, args.old_flags, buckets)
        new = open_side(args.new, args.new_flags, buckets, old)
        require_alike(old, new)
    except (CannotDiff, ResultsInvalid) as error:
        raise UsageError(str(error)) from error
    if old.results is not None and new.results is not None:
        moved, gone, added = compare_results(old.results, new.results)
        if not moved:
            raise UsageError(f"{old.name} and {new.name} have no figure in common.")
        show_results(moved, gone, added, args.fail_above)
        regressions = [m for m in moved if m.regressed(args.fail_above)]
        _write(
            args.json,
            {"results": [m.to_json() for m in moved], "only_old": gone, "only_new": added},
            regressions,
        )
        return 1 if regressions else 0
    from compilerllm.cli.diff_builds import show_builds
    from compilerllm.diff.builds import compare_builds

    found = compare_builds(old, new)
    show_builds(found, args.ir)
    slower = regressed_buckets(found, args.fail_above)
    if slower:
        print(
            f"\nregression: measured steps are slower by more than {args.fail_above:.1%}: {', '.join(slower)}"
        )
    _write(args.json, found.to_json(), [])
    return 1 if slower else 0


def regressed_buckets(found: "BuildDiff", threshold: float) -> list[str]:
    """Buckets whose measured step is slower by more than ``threshold``: a report has means of many runs, no samples."""
    return [b.name for b in found.buckets if b.measured and b.step_old and b.delta / b.step_old > threshold]


def share(text: str) -> float:
    """An argparse type: "3%" or "0.03"."""
    try:
        value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no share such as 3% or 0.03")
    return value


def _write(file: Path | None, data: dict[str, Any], regressions: "list[Moved]") -> None:
    """Raises ``CannotWriteResults``."""
    if file is None:
        return
    from compilerllm.benchmark import CannotWriteResults

    try:
        file.write_text(
            json.dumps(data | {"regressions": [m.to_json() for m in regressions]}, indent=1) + "\n"
        )
    except OSError as error:
        raise CannotWriteResults(
            f"cannot write {file}: {error.strerror or error}. Name another with --json."
        ) from error
    print(f"written: {file}", file=sys.stderr)
