"""Continue a text with a model behind a running server; the text appears as it is written.

    compilerllm complete "Once upon a time"                        the server of this machine
    compilerllm complete --url http://gpu:8000/v1 --max-tokens 50 "def main():"
    compilerllm complete < prompts.txt                             a line is a text, and so is each line in a terminal

Without a server, `compilerllm generate MODEL TEXT` runs a model in this process. Only the sampling flags that you give are
sent; the server decides the rest. Ctrl-C stops a text.
"""

import argparse
import sys
from contextlib import closing

from compilerllm.cli.chat import show
from compilerllm.cli.flags import add_sampling_flags
from compilerllm.cli.server_flags import DEFAULT_URL, Conversation, add_server_flags, given_sampling
from compilerllm.errors import CompilerLLMError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "text", nargs="?", metavar="TEXT", help="What to continue; without it, lines are read."
    )
    parser.add_argument(
        "--model", metavar="NAME", help="The model's name there; by default the first listed."
    )
    add_server_flags(parser, DEFAULT_URL)
    add_sampling_flags(parser, 64)


def run(args: argparse.Namespace) -> int:
    # The server's own default is 16 tokens, which is little for a text.
    options = {"max_tokens": args.max_tokens, **given_sampling(args)}
    with closing(Conversation(args.url, args.api_key, args.model, options)) as server:
        if args.text is not None:
            show(server.complete(args.text))
            return 0
        return _each_line(server)


def _each_line(server: Conversation) -> int:
    interactive, status = sys.stdin.isatty(), 0
    while True:
        try:
            line = input("> " if interactive else "")
        except EOFError:
            if interactive:
                print()
            return status
        except KeyboardInterrupt:
            if not interactive:
                raise
            print("\nCtrl-D ends.")
            continue
        if not line:
            continue
        try:
            show(server.complete(line))
        except CompilerLLMError as error:
            print(error, file=sys.stderr)
            status = 0 if interactive else 1
