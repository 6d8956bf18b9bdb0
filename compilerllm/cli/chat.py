"""Talk with a model in the terminal. It runs in this process; answers appear as they are written.

    compilerllm chat                    the demo model
    compilerllm chat model.gguf --system "You are a pirate."

In the chat: /clear forgets what was said, /exit or Ctrl-D ends, Ctrl-C stops an answer.
"""

import argparse
import sys
from typing import TYPE_CHECKING, Any

from compilerllm.cli.flags import add_engine_flags, add_sampling_flags, read_engine_config, read_sampling
from compilerllm.errors import InvalidParameter

if TYPE_CHECKING:
    from compilerllm.llm import LLM
    from compilerllm.sampling_params import SamplingParams


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", nargs="?", metavar="MODEL", help="A folder, a hub id or a .gguf file; by default the demo's."
    )
    parser.add_argument("--system", metavar="TEXT", help="Instructions that stand before the chat.")
    add_sampling_flags(parser, 512)
    add_engine_flags(parser, ("served_model_name",), starts=True)


def run(args: argparse.Namespace) -> int:
    params = read_sampling(args)
    from compilerllm.cli.local import open_model
    from compilerllm.cli.terminal import print_card, startup_card

    found, llm = open_model(read_engine_config(args))
    with llm:
        if sys.stdin.isatty():
            print_card(startup_card(llm.card, found))
        talk(llm, params, args.system)
    return 0


def talk(llm: "LLM", params: "SamplingParams", system: str | None) -> None:
    """Read lines from standard input and answer them until its end."""
    start: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    said = list(start)
    while (line := _ask()) is not None:
        if line == "/clear":
            said = list(start)
        elif line == "/exit":
            return
        elif line:
            said.append({"role": "user", "content": line})
            try:
                said.append({"role": "assistant", "content": _answer(llm, said, params)})
            except InvalidParameter as error:  # too long by now, or refused by the template
                said.pop()
                print(f"{error}\n/clear starts anew.", file=sys.stderr)


def _ask() -> str | None:
    try:
        return input("> " if sys.stdin.isatty() else "").strip()
    except EOFError:
        return None


def _answer(llm: "LLM", said: list[dict[str, Any]], params: "SamplingParams") -> str:
    pieces: list[str] = []
    stream = llm.stream_chat(said, params)
    try:
        for piece in stream:
            pieces.append(piece)
            print(piece, end="", flush=True)
    except KeyboardInterrupt:
        print(" [stopped]", end="")
    finally:
        stream.close()
    print()
    return "".join(pieces)
