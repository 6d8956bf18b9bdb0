"""Flags from configuration dataclasses: name, type, default and help all come from the field."""

import argparse
import dataclasses
import difflib
import sys
import types
import typing
from collections.abc import Sequence
from typing import Any, NoReturn

from compilerllm.cli.config_file import read_config_file
from compilerllm.cli.other_flags import what_instead
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
        if "config_file" in flags:
            return self._with_file(found, rest, sys.argv[1:] if args is None else args)
        return found, rest

    def _with_file(
        self, found: argparse.Namespace, rest: list[str], args: Sequence[str]
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse again, with what the file of ``--config`` has and the command line has not in front."""
        if sum(word.partition("=")[0] == "--config" for word in args) > 1:
            self.error("--config can be given once")
        actions = {a.option_strings[0]: a for a in self._actions if a.option_strings}
        words: list[str] = []
        for flag, value in read_config_file(found.config_file).items():
            if flag == "--model" and flag not in actions:
                words += [] if found.model is not None else [str(value)]
            elif flag not in actions or actions[flag].dest in ("help", "debug", "config_file"):
                self.error(f"{found.config_file}: {self._unknown(flag).replace('--', '')}")
            elif actions[flag].dest not in found.given:
                words += self._words(found.config_file, actions[flag], value)
        rest_of_line = [word for word in args if not word.startswith("--config=")]
        if "--config" in rest_of_line:
            at = rest_of_line.index("--config")
            del rest_of_line[at : at + 2]
        again, rest = self.parse_known_args([*words, *rest_of_line])
        again.config_file = found.config_file
        return again, rest

    def _words(self, path: str, action: argparse.Action, value: Any) -> list[str]:
        """A value of the file as it would stand on the command line."""
        flag = action.option_strings[0]
        if isinstance(action, argparse.BooleanOptionalAction):
            if not isinstance(value, bool):
                self.error(f"{path}: {flag.removeprefix('--')} must be true or false, but is {value!r}")
            return [flag if value else "--no-" + flag.removeprefix("--")]
        many = value if isinstance(value, list) and isinstance(action, Listed) else [value]
        for item in many:
            if isinstance(item, bool | dict | list):
                self.error(f"{path}: {flag.removeprefix('--')} cannot be {item!r}")
        return [f"{flag}={item}" for item in many if item is not None]

    def refuse_unknown(self, rest: list[str]) -> None:
        """Raise ``UsageError`` for arguments that nothing took."""
        if not rest:
            return
        name = rest[0].partition("=")[0]
        self.error(self._unknown(name) if name.startswith("-") else f"unknown argument {name!r}")

    def _unknown(self, flag: str) -> str:
        """What to say of a flag that there is not: what it is here, or the nearest."""
        known = [option for action in self._actions for option in action.option_strings]
        if instead := what_instead(flag):
            return f"{flag}: {instead}"
        near = difflib.get_close_matches(flag, known, 1)
        return f"unknown flag {flag!r}" + (f"; did you mean {near[0]}?" if near else "")


class Listed(argparse.Action):
    """A flag that may be repeated; the first one replaces the default. ``const``: its values are separated by commas."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        so_far = getattr(namespace, self.dest)
        parts = [part.strip() for part in values.split(",")] if self.const else [values]
        setattr(namespace, self.dest, (() if so_far is self.default else so_far) + tuple(parts))


class _Help(argparse.RawDescriptionHelpFormatter):
    """Defaults where there is one worth telling."""

    def _get_help_string(self, action: argparse.Action) -> str:
        text = action.help or ""
        if (
            action.default in (None, argparse.SUPPRESS, False)
            or not action.option_strings
            or "default" in text
            or action.default in ((), "")
        ):
            return text
        shown = "on" if action.default is True else "%(default)s"
        if isinstance(action.default, tuple):
            shown = ",".join(action.default)
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
    if typing.get_origin(kinds[0]) is tuple:
        return {**options, "action": Listed, "const": field.metadata.get("commas", False), "metavar": "TEXT"}
    if typing.get_origin(kinds[0]) is typing.Literal:
        return {**options, "choices": typing.get_args(kinds[0])}
    return {**options, "type": kinds[0], "metavar": {"int": "N", "float": "X"}.get(kinds[0].__name__, "TEXT")}


def add_config_file(parser: argparse.ArgumentParser) -> None:
    """``--config FILE``: flags from a file."""
    parser.add_argument(
        "--config",
        dest="config_file",
        metavar="FILE",
        help="YAML file of flags, `max-num-seqs: 64` a line (also `model: MODEL`); the command line wins over it.",
    )


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
