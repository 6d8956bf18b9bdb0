"""Flags that the benchmarks have in common, and the model they open."""

import argparse
import gc
from pathlib import Path
from typing import TYPE_CHECKING

from compilerllm.cli.flags import UsageError, add_engine_flags, read_engine_config
from compilerllm.config import EngineConfig

if TYPE_CHECKING:
    from compilerllm.llm import LLM


def add_common_flags(parser: argparse.ArgumentParser) -> None:
    """MODEL, --seed, --output and the engine's flags."""
    parser.add_argument(
        "model", nargs="?", metavar="MODEL", help="A folder, a hub id or a .gguf file; by default the demo's."
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="Of the prompts and their lengths.")
    parser.add_argument("--output", type=Path, metavar="FILE", help="Append the JSON line to this file.")
    add_engine_flags(parser, ("served_model_name",), starts=True)
    parser.set_defaults(enable_prefix_caching=False)


def open_quietly(args: argparse.Namespace) -> "tuple[EngineConfig, LLM]":
    """The model, compiled with a progress bar if need be."""
    from compilerllm.cli.local import open_model

    config = read_engine_config(args)
    llm = open_model(config)[1]
    gc.collect()
    gc.freeze()  # as an engine process does: collections while it runs need not look at what lives for ever
    return config, llm


def whole_number(text: str) -> int:
    """An argparse type: 1 or more."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least 1")
    return int(text)


def whole_numbers(text: str) -> list[int]:
    """An argparse type: "1,8,32"."""
    return [whole_number(part.strip()) for part in text.split(",")]


def length_range(text: str) -> tuple[int, int]:
    """An argparse type: "128", or "64:1024" for lengths drawn between the two, both included."""
    low, _, high = text.partition(":")
    first, last = whole_number(low), whole_number(high or low)
    if first > last:
        raise argparse.ArgumentTypeError(f"{text!r}: {first} is more than {last}")
    return first, last


def require_fit(prompt: int, output: int, limit: int) -> None:
    """Raise ``UsageError`` where the longest request would not fit the context."""
    if prompt + output > limit:
        raise UsageError(
            f"--input-len {prompt} and --output-len {output} make {prompt + output} tokens, but the context ends at "
            f"{limit}. Lower one of them, or raise --max-model-len."
        )
