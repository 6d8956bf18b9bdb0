"""Flags from configuration dataclasses: name, type, default and help all come from the field."""

import argparse
import dataclasses
import difflib
import sys
import types
import typing
from collections.abc import Sequence
from typing import Any, NoReturn

from compilerllm.config import CONFIG_PARTS, EngineConfig, flag_of
from compilerllm.errors import CompilerLLMError

_TITLES = {
    "model": "which model, and how it is compiled",
    "cache": "memory",
    "scheduler": "batching",
    "start": "which artifact",
    "structured": "outputs that must have a form",
}


class UsageError(CompilerLLMError):
    """A command line that does not parse."""


class Parser(argparse.ArgumentParser):
    """argparse that names the nearest flag for an unknown one and never accepts abbreviations."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, "formatter_class": _Help, **options})

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}\n  {self.prog} --help lists what there is")

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """As argparse's; ``given`` of the result are the names of the flags that are there."""
        words = {word.partition("=")[0] for word in (sys.argv[1:] if args is None else args)}
        found, rest = super().parse_known_args(args, namespace)
        flags = {a.dest for a in self._actions if words.intersection(a.option_strings)}
        found.given = flags | getattr(found, "given", set())
        return found, rest

    def refuse_unknown(self, rest: list[str]) -> None:
        """Raise ``UsageError`` for arguments that nothing took."""
        if not rest:
            return
        name = rest[0].partition("=")[0]
        known = [option for action in self._actions for option in action.option_strings]
        near = difflib.get_close_matches(name, known, 1) if name.startswith("-") else []
        kind = "flag" if name.startswith("-") else "argument"
        self.error(f"unknown {kind} {name!r}" + (f"; did you mean {near[0]}?" if near else ""))


class _Help(argparse.RawDescriptionHelpFormatter):
    """Defaults where there is one worth telling."""

    def _get_help_string(self, action: argparse.Action) -> str:
        text = action.help or ""
        if (
            action.default in (None, argparse.SUPPRESS, False)
            or not action.option_strings
            or "default" in text
        ):
            return text
        shown = "on" if action.default is True else "%(default)s"
        return f"{text} (default: {shown})"


def add_config(
    parser: argparse.ArgumentParser, title: str, kind: type[Any], skip: tuple[str, ...] = ()
) -> None:
    """A flag for each field of a dataclass, in a group called ``title``."""
    group = parser.add_argument_group(title)
    hints = typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):
        if field.name not in skip:
            group.add_argument(flag_of(field.name), **_options_of(field, hints[field.name]))


def _options_of(field: "dataclasses.Field[Any]", hint: Any) -> dict[str, Any]:
    options: dict[str, Any] = {
        "default": field.default,
        "help": field.metadata["help"].replace("%", "%%"),
        "dest": field.name,
    }
    kinds = [
        k
        for k in (typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,))
        if k is not type(None)
    ]
    if kinds[0] is bool:
        return {**options, "action": argparse.BooleanOptionalAction}
    if typing.get_origin(kinds[0]) is typing.Literal:
        return {**options, "choices": typing.get_args(kinds[0])}
    return {**options, "type": kinds[0], "metavar": {"int": "N", "float": "X"}.get(kinds[0].__name__, "TEXT")}


def read_config(args: argparse.Namespace, kind: type[Any], **fixed: Any) -> Any:
    """The dataclass that ``add_config``'s flags describe."""
    fields = {f.name: getattr(args, f.name) for f in dataclasses.fields(kind) if hasattr(args, f.name)}
    return kind(**{**fields, **fixed})


def add_engine_flags(
    parser: argparse.ArgumentParser, skip: tuple[str, ...] = (), starts: bool = False
) -> None:
    """All flags of an engine, a group a part; MODEL itself is positional. starts: also those of what runs one."""
    for name, part in CONFIG_PARTS.items():
        if name != "start" or starts:
            add_config(parser, _TITLES[name], part, ("model", *skip))


def read_engine_config(args: argparse.Namespace) -> EngineConfig:
    """The engine's configuration; without MODEL the demo model's, under a short name."""
    from compilerllm.checkpoint import demo_model

    names = [f.name for part in CONFIG_PARTS.values() for f in dataclasses.fields(part)]
    options = {name: getattr(args, name) for name in names if hasattr(args, name)}
    if options["model"] is None and options.get("artifact") is None:
        options["model"] = str(demo_model())
        options["served_model_name"] = options.get("served_model_name") or "SmolLM2-135M-Instruct"
    return EngineConfig.create(given=set(getattr(args, "given", options)) & set(options), **options)


def add_sampling_flags(parser: argparse.ArgumentParser, max_tokens: int) -> None:
    group = parser.add_argument_group("how tokens are chosen")
    group.add_argument(
        "--max-tokens", type=int, default=max_tokens, metavar="N", help="Most tokens to generate."
    )
    group.add_argument(
        "--temperature", type=float, default=0.0, metavar="X", help="0 takes the likeliest token each time."
    )
    group.add_argument(
        "--top-p",
        type=float,
        default=1.0,
        metavar="X",
        help="Choose among the likeliest tokens of this mass.",
    )
    group.add_argument(
        "--top-k", type=int, default=0, metavar="N", help="Choose among this many likeliest tokens; 0 is all."
    )
    group.add_argument("--seed", type=int, metavar="N", help="Makes random choices repeatable.")
    group.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="End before this text; may be repeated."
    )


def read_sampling(args: argparse.Namespace) -> Any:
    from compilerllm.sampling_params import SamplingParams

    return SamplingParams(
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        seed=args.seed,
        stop=tuple(args.stop),
    )
