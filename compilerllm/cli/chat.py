"""Talk with a model in the terminal; answers appear as they are written. The model runs in this process, or behind --url.

    compilerllm chat                                          the demo model, in this process
    compilerllm chat model.gguf --system "You are a pirate."
    compilerllm chat --url http://127.0.0.1:8000/v1           a running server, and the first model it lists
    echo "Name a colour." | compilerllm chat --url URL        a line is a question; answers go to standard output

In the chat: /help lists the commands (/system, /reset, /save, /exit), Ctrl-C stops an answer, Ctrl-D ends. With --url only
the sampling flags that you give are sent; the server decides the rest. Engine flags are for a model in this process.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

from compilerllm.cli.flags import (
    UsageError,
    add_engine_flags,
    add_sampling_flags,
    read_engine_config,
    read_sampling,
)
from compilerllm.cli.server_flags import (
    Conversation,
    Piece,
    add_server_flags,
    given_sampling,
    refuse_engine_flags,
)
from compilerllm.errors import CompilerLLMError

Answer = Callable[[list[dict[str, Any]]], Iterator[Piece]]

_COMMANDS = """/system TEXT   put these instructions before the chat; without TEXT, show them
/reset         forget what was said, keep the instructions (/clear is the same)
/save FILE     write the chat as JSON messages
/exit          end (Ctrl-D is the same)
Ctrl-C         stop an answer; what was said stays"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", nargs="?", metavar="MODEL",
        help="A folder, a hub id or a .gguf file; by default the demo's. With --url: the model's name there.",
    )  # fmt: skip
    parser.add_argument("--system", metavar="TEXT", help="Instructions that stand before the chat.")
    add_server_flags(parser)
    add_sampling_flags(parser, 512)
    add_engine_flags(parser, ("served_model_name",), starts=True)


def run(args: argparse.Namespace) -> int:
    if args.url is not None:
        return _run_remotely(args)
    if args.api_key is not None:
        raise UsageError("--api-key is for a server: give --url too")
    params = read_sampling(args)
    from compilerllm.cli.local import open_model
    from compilerllm.cli.terminal import print_card, startup_card

    found, llm = open_model(read_engine_config(args))
    with llm:
        if sys.stdin.isatty():
            print_card(startup_card(llm.card, found))

        def answer(messages: list[dict[str, Any]]) -> Iterator[Piece]:
            with closing(llm.stream_chat(messages, params)) as pieces:
                yield from map(Piece, pieces)

        return talk(answer, args.system)


def _run_remotely(args: argparse.Namespace) -> int:
    refuse_engine_flags(args)
    with closing(Conversation(args.url, args.api_key, args.model, given_sampling(args))) as conversation:
        if sys.stdin.isatty():
            print(f"{conversation.model} at {conversation.url}; /help lists the commands")
        return talk(conversation.chat, args.system)


def talk(answer: Answer, system: str | None) -> int:
    """Read lines from standard input and answer them until its end. Returns the exit status: 1 where one had no answer."""
    chat, status = _Chat(answer, system), 0
    interactive = sys.stdin.isatty()
    if interactive:
        import readline  # noqa: F401 - input() then has history and editing
    while True:
        try:
            line = input("> " if interactive else "").strip()
        except EOFError:
            if interactive:
                print()
            return status
        except KeyboardInterrupt:
            if not interactive:
                raise
            print("\n/exit or Ctrl-D ends.")
            continue
        if line in ("/exit", "/quit"):
            return status
        try:
            chat.take(line)
        except CompilerLLMError as error:  # too long by now, refused, or the server is gone
            print(f"{error}" + ("" if line.startswith("/") else "\n/reset starts anew."), file=sys.stderr)
            status = 0 if interactive else 1


class _Chat:
    """What was said so far."""

    def __init__(self, answer: Answer, system: str | None) -> None:
        self._answer, self._system = answer, system
        self._said: list[dict[str, Any]] = []

    @property
    def messages(self) -> list[dict[str, Any]]:
        start = [{"role": "system", "content": self._system}] if self._system else []
        return [*start, *self._said]

    def take(self, line: str) -> None:
        """A line of the user's. Raises ``CompilerLLMError`` where it has no answer; then it was not said."""
        command, _, rest = line.partition(" ")
        if not line:
            return
        if command == "/system":
            self._set_system(rest.strip())
        elif command in ("/reset", "/clear"):
            self._said.clear()
        elif command == "/save":
            self._save(rest.strip())
        elif command == "/help":
            print(_COMMANDS)
        elif command.startswith("/") and command[1:].isalpha():
            raise UsageError(f"there is no command {command}; /help lists them")
        else:
            self._ask(line)

    def _ask(self, line: str) -> None:
        self._said.append({"role": "user", "content": line})
        text = ""
        try:
            text = show(self._answer(self.messages))
        finally:
            if text:
                self._said.append({"role": "assistant", "content": text})
            else:
                self._said.pop()

    def _set_system(self, text: str) -> None:
        if text:
            self._system = text
        else:
            print(self._system or "There are no instructions; /system TEXT gives some.")

    def _save(self, name: str) -> None:
        if not name:
            raise UsageError("/save needs a file's name")
        try:
            Path(name).write_text(json.dumps(self.messages, ensure_ascii=False, indent=1) + "\n")
        except OSError as error:
            raise UsageError(f"cannot write {name}: {error.strerror or error}") from error
        print(f"{len(self.messages)} messages in {name}")


def show(pieces: Iterator[Piece]) -> str:
    """Print an answer as it comes; reasoning is dimmed on a terminal and left out elsewhere. Ctrl-C stops it.

    Returns the answer's text, without the reasoning.
    """
    terminal, dim, text = sys.stdout.isatty(), False, []
    try:
        for piece in pieces:
            if piece.thought != dim and terminal:
                print("\x1b[2m" if piece.thought else "\x1b[0m\n", end="")
                dim = piece.thought
            if not piece.thought:
                text.append(piece.text)
            if terminal or not piece.thought:
                print(piece.text, end="", flush=True)
    except KeyboardInterrupt:
        print(" [stopped]", end="")
    finally:
        if dim:
            print("\x1b[0m", end="")
        pieces.close()  # type: ignore[attr-defined]
    print()
    return "".join(text)
