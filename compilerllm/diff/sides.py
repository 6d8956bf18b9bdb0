"""What is compared: an artifact, a model built as its flags say, a report of explain, or benchmark results."""

import argparse
import json
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compilerllm.artifact import ArtifactInvalid, read_manifest
from compilerllm.diff.results import ResultsInvalid, read_results
from compilerllm.errors import CompilerLLMError

if TYPE_CHECKING:
    from compilerllm.explain.report import Report


class CannotDiff(CompilerLLMError):
    """Two things that have nothing to compare."""


@dataclass(frozen=True)
class Side:
    """One of the two. results: of a benchmark. Otherwise manifest and folder, of an artifact, and the report of either an
    artifact or a file; without a report there is ``why``."""

    name: str
    results: list[dict[str, Any]] | None = None
    report: "Report | None" = None
    manifest: dict[str, Any] | None = None
    folder: Path | None = None
    why: str = ""


def open_side(text: str, flags: str, buckets: tuple[str, ...], beside: "Side | None" = None) -> Side:
    """What ``text`` names: FILE, FILE@COMMIT, an artifact, or a model with ``flags`` (of ``build``, as one string).

    beside: the other side, whose machine's figures predict this one's times too: measured anew they would differ a little.
    """
    from compilerllm.bundle import is_artifact, open_artifact

    name, commit = text, ""
    path = Path(text).expanduser()
    if not path.exists() and "@" in text and Path(text.rpartition("@")[0]).is_file():
        name, _, commit = text.rpartition("@")
        path = Path(name)
    if path.is_file() and path.suffix in (".json", ".jsonl"):
        return _open_file(path, commit, text)
    if is_artifact(path):
        return of_artifact(
            open_artifact(path, parse_flags(text, flags).target, to_run=False), text, buckets, beside
        )
    return of_artifact(_built(text, flags), f"{text} {flags}".strip(), buckets, beside)


def _open_file(path: Path, commit: str, name: str) -> Side:
    from compilerllm.explain.report import Report

    if not commit:
        try:
            whole = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            whole = None  # lines, or no JSON: the next reader says which
        if isinstance(whole, dict) and "schema" in whole and "buckets" in whole:
            return Side(name, report=Report.from_json(whole))
    return Side(name, results=read_results(path, commit))


def of_artifact(folder: Path, name: str, buckets: tuple[str, ...], beside: Side | None = None) -> Side:
    """An artifact with its report, where this version's passes can make one."""
    from compilerllm.explain.collect import Look, collect

    manifest = read_manifest(folder)
    assert manifest is not None, "the folder holds a finished artifact"
    look = Look(buckets)
    machine = beside.report.machine if beside is not None and beside.report is not None else None
    if machine is not None and machine.target == manifest["target"]:
        look = Look(buckets, bandwidth=machine.bandwidth, tflops=machine.tflops)
    try:
        report = collect(folder, name, look).report
    except ArtifactInvalid as error:
        return Side(name, manifest=manifest, folder=folder, why=str(error))
    return Side(name, report=report, manifest=manifest, folder=folder)


def parse_flags(model: str, flags: str) -> argparse.Namespace:
    """Flags of a build, given as one string. Raises ``UsageError``."""
    from compilerllm.cli.flags import Parser, add_engine_flags

    parser = Parser(prog="compilerllm diff --old/--new", add_help=False)
    parser.add_argument("--target")
    parser.add_argument("--from-config", action="store_true")
    add_engine_flags(parser, ("served_model_name",))
    args = parser.parse_args(shlex.split(flags))
    args.model = model
    return args


def _built(model: str, flags: str) -> Path:
    """The artifact of a model, through the cache."""
    from dataclasses import replace

    from compilerllm.checkpoint import locate
    from compilerllm.cli.flags import read_engine_config
    from compilerllm.cli.terminal import compile_progress
    from compilerllm.compiler import CompileRequest, ensure_artifact

    args = parse_flags(model, flags)
    request = CompileRequest.of(read_engine_config(args), args.target)
    if args.from_config:
        request = replace(request, load_format="config")
    with compile_progress() as on_stage:
        return ensure_artifact(request, locate(model), on_stage).path


def require_alike(old: Side, new: Side) -> None:
    """Raise ``CannotDiff`` where one is a result and the other a build."""
    if (old.results is None) != (new.results is None):
        results, build = (old, new) if old.results is not None else (new, old)
        raise CannotDiff(
            f"{results.name} holds benchmark results and {build.name} is a build: give two of one kind."
        )


__all__ = ["CannotDiff", "ResultsInvalid", "Side", "of_artifact", "open_side", "parse_flags", "require_alike"]
