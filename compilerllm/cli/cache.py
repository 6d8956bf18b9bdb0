"""The artifact cache: what is in it, why a model misses, and how to make room or carry artifacts elsewhere.

compilerllm cache ls
compilerllm cache why 1f3a 9c20                  the fields in which two artifacts differ (keys, folders, bundles, .cllm)
compilerllm cache why model/ --dtype float32     why this model, with these flags, hits or misses
compilerllm cache gc --max-size 20GiB --older-than 30d --dry-run
compilerllm cache export all.cllm                every artifact, or those with the keys named, in one file
compilerllm cache import all.cllm

Keys may be shortened to where they are unique. Artifacts that a process serves are never removed.
"""

import argparse
import re
import time
from typing import TYPE_CHECKING, Any

from compilerllm.cli.flags import Parser, UsageError, add_engine_flags

if TYPE_CHECKING:
    from compilerllm.cache import Collected, Entry

_PERIODS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(
        dest="action", metavar="ls|why|gc|export|import", required=True, parser_class=Parser
    )

    def command(name: str, text: str) -> argparse.ArgumentParser:
        made = commands.add_parser(name, help=text, description=text)
        made.set_defaults(parser=made)
        return made

    command("ls", "A line for each artifact, the last used first.")
    why = command("why", "Which fields differ: of two artifacts, or of a model and its nearest artifact.")
    why.add_argument(
        "a", metavar="A", help="A key, an artifact's folder, a bundle, a packed file, or a model."
    )
    why.add_argument(
        "b", metavar="B", nargs="?", help="Another; without it A is a model, built with the flags."
    )
    why.add_argument("--target", metavar="NAME", help="Of a model, or which of a bundle's artifacts.")
    add_engine_flags(why, ("served_model_name",))
    gc = command("gc", "Remove what is damaged, what killed builds left, and what limits say.")
    gc.add_argument("--max-size", metavar="SIZE", help="Then the longest unused, until all take this: 20GiB.")
    gc.add_argument("--older-than", metavar="TIME", help="Artifacts unused for so long: 30d, 12h, 45m.")
    gc.add_argument("--dry-run", action="store_true", help="Say what would go, remove nothing.")
    export = command("export", "Pack artifacts into one file.")
    export.add_argument("file", metavar="FILE.cllm")
    export.add_argument("keys", metavar="KEY", nargs="*", help="By default every artifact.")
    command("import", "Take over the artifacts of a packed file, each verified.").add_argument(
        "file", metavar="FILE.cllm"
    )


def run(args: argparse.Namespace) -> int:
    return {"ls": _ls, "why": _why, "gc": _gc, "export": _export, "import": _import}[args.action](args)


def _ls(args: argparse.Namespace) -> int:
    from compilerllm.benchmark import print_table
    from compilerllm.cache import list_entries
    from compilerllm.environment import cache_dir

    entries, damaged = list_entries()
    now = time.time()
    if entries:
        print_table(
            ("key", "model", "target", "level", "size", "built", "last used"),
            [
                (
                    e.key[:12], e.model, str(e.manifest["target"]), f"O{e.manifest['level']}", _size(e.bytes),
                    _ago(now - e.built), _ago(now - e.used),
                )
                for e in entries
            ],
        )  # fmt: skip
    for error in damaged.values():
        print(f"damaged: {error}")
    total = sum(e.bytes for e in entries)
    print(f"{len(entries)} artifacts, {_size(total)}, in {cache_dir()}")
    return 0


def _size(count: int) -> str:
    return f"{count / 2**20:,.1f} MiB" if count < 2**30 else f"{count / 2**30:,.2f} GiB"


def _ago(seconds: float) -> str:
    for unit in ("d", "h", "m"):
        if seconds >= _PERIODS[unit]:
            return f"{seconds / _PERIODS[unit]:.0f} {unit} ago"
    return "now"


def _why(args: argparse.Namespace) -> int:
    from compilerllm.cache import nearest
    from compilerllm.description import differing

    if args.b is not None:
        return _print_differences(
            differing(_fields_of(args.a, args.target), _fields_of(args.b, args.target)), args.a, args.b
        )
    digest, fields = _key_of_model(args)
    near = nearest(fields)
    if near is None:
        print(f"{digest}: a miss. The cache has nothing of this model for {fields['target']}.")
        return 0
    entry, differences = near
    if not differences:
        print(f"{digest}: a hit.")
        return 0
    print(f"{digest}: a miss. The nearest artifact differs:")
    return _print_differences(differences, f"{entry.key[:12]} ({entry.model})", "this")


def _print_differences(differences: list[tuple[str, Any, Any]], a: str, b: str) -> int:
    from compilerllm.benchmark import print_table
    from compilerllm.cache import short

    if differences:
        print_table(("field", a, b), [(name, short(old), short(new)) for name, old, new in differences])
    else:
        print("no field differs: they are the same build")
    return 0


def _fields_of(name: str, target: str | None) -> dict[str, Any]:
    from pathlib import Path

    from compilerllm.artifact import read_manifest
    from compilerllm.bundle import is_artifact, open_artifact
    from compilerllm.cache import find_entry

    if is_artifact(Path(name).expanduser()):
        fields: dict[str, Any] = (read_manifest(open_artifact(Path(name), target, to_run=False)) or {})[
            "key"
        ]["fields"]
        return fields
    return dict(find_entry(name).fields)


def _key_of_model(args: argparse.Namespace) -> tuple[str, dict[str, Any]]:
    from compilerllm.checkpoint import locate
    from compilerllm.cli.flags import read_engine_config
    from compilerllm.compiler import CompileRequest, artifact_key

    args.model = args.a
    request = CompileRequest.of(read_engine_config(args), args.target)
    key = artifact_key(request, locate(args.a))
    return key.digest, key.fields


def _gc(args: argparse.Namespace) -> int:
    from compilerllm.cache import collect
    from compilerllm.config import parse_size

    limit = None if args.max_size is None else parse_size(args.max_size, "max_size")
    age = None if args.older_than is None else _period(args.older_than)
    done = collect(limit, age, args.dry_run)
    for line in _collected(done, "would remove" if args.dry_run else "removed"):
        print(line)
    return 0


def _collected(done: "Collected", verb: str) -> list[str]:
    lines = [
        f"{verb} {e.key[:12]} ({e.model}, {e.manifest['target']}, {_size(e.bytes)})" for e in done.artifacts
    ]
    lines += [f"{verb} what is damaged: {text}" for text in done.damaged]
    lines += [f"kept {e.key[:12]} ({e.model}): it is in use" for e in done.in_use]
    if done.building:
        lines.append("a build is running: kernels and libraries without an artifact were left alone")
    if done.orphans:
        lines.append(f"{verb} {len(done.orphans)} kernels, libraries and leftovers that no artifact has")
    return [*lines, f"{verb} {_size(done.bytes)} in all"]


def _period(text: str) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text.strip())
    if not found:
        raise UsageError(f"--older-than must be a time such as 30d, 12h, 45m or 90s, but is {text!r}")
    return float(found[1]) * _PERIODS[found[2]]


def _export(args: argparse.Namespace) -> int:
    from pathlib import Path

    from compilerllm.bundle import pack
    from compilerllm.cache import UnknownKey, find_entry, list_entries

    entries: list[Entry] = [find_entry(k) for k in args.keys] if args.keys else list_entries()[0]
    if not entries:
        raise UnknownKey("the cache is empty: there is nothing to export.")
    chosen: dict[str, Path] = {e.key: e.path for e in entries}
    pack(chosen, Path(args.file).expanduser())
    print(f"{len(chosen)} artifacts in {args.file}, {_size(Path(args.file).expanduser().stat().st_size)}")
    return 0


def _import(args: argparse.Namespace) -> int:
    from pathlib import Path

    from compilerllm.bundle import import_artifacts

    for key, new in import_artifacts(Path(args.file).expanduser()).items():
        print(f"{key[:12]} {'imported' if new else 'was there'}")
    return 0
