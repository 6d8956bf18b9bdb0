"""The entry point: finds the command, runs it, and turns errors into a message and an exit status.

Exit status: 0 done, 1 a mistake that the message explains, 2 a command line that does not parse, 130 interrupted,
141 nobody reads the output.
"""

import difflib
import importlib
import os
import sys

from compilerllm.cli.flags import Parser, UsageError
from compilerllm.errors import OUT_OF_MEMORY, CompilerLLMError

# Command -> its line in the help. Each is a module of this package with ``add_arguments`` and ``run``.
COMMANDS = {
    "serve": "serve a model over HTTP, OpenAI's API; without MODEL the demo's",
    "generate": "continue a text, and stop",
    "chat": "talk with a model in the terminal, or with a running server's",
    "complete": "continue a text with a running server's model",
    "run-batch": "answer a file of requests, OpenAI's batch format",
    "compile": "build the artifact ahead of time, serve nothing",
    "build": "build artifacts for other machines, into a folder or one file",
    "cache": "what is in the cache, why it misses; make room, export, import",
    "tune": "time candidate kernels of a model's shapes on this GPU",
    "bench": "measure a model or a server: latency, throughput, startup, kernels, serve",
    "bisect": "find the pass, node and kernel that make a model wrong",
    "plan": "does it fit into a memory, with which context and batch",
    "explain": "every kernel: where it came from, why it was chosen, what it costs",
    "diff": "what moved between two artifacts, models or benchmark results",
    "opt": "run passes over a graph and print it; why did it not fuse?",
    "collect-env": "what to put into a bug report",
}

_OVERVIEW = """usage: compilerllm COMMAND [ARGUMENTS]

Serves language models that were compiled first.

{commands}

  compilerllm COMMAND --help   every flag of a command, with its default
  compilerllm --version        the version

Start with:  compilerllm serve          the demo model, on port 8000
             compilerllm chat           talk with it here
"""


def main(argv: list[str] | None = None) -> int:
    """Run a command line (``sys.argv`` by default). Returns the exit status."""
    arguments = sys.argv[1:] if argv is None else argv
    debug = "--debug" in arguments
    try:
        return _run([a for a in arguments if a != "--debug"])
    except UsageError as error:
        print(f"compilerllm: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # whoever read our output, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except MemoryError as error:
        if debug:
            raise
        print(
            f"compilerllm: {OUT_OF_MEMORY} ({error})" if str(error) else f"compilerllm: {OUT_OF_MEMORY}",
            file=sys.stderr,
        )
        return 1
    except Exception as error:
        if debug or not _is_explained(error):
            raise
        print(f"compilerllm: {error}", file=sys.stderr)
        return 1


def _run(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(
            _OVERVIEW.format(commands="\n".join(f"  {name:<14}{text}" for name, text in COMMANDS.items())),
            end="",
        )
        return 0 if arguments else 2
    name = arguments[0]
    if name in ("-V", "--version"):
        from compilerllm import __version__

        print(f"compilerllm {__version__}")
        return 0
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, 1)
        hint = f"; did you mean {near[0]}?" if near else f"; commands are {', '.join(COMMANDS)}"
        raise UsageError(f"unknown command {name!r}{hint}")
    command = importlib.import_module("compilerllm.cli." + name.replace("-", "_"))
    parser = Parser(prog=f"compilerllm {name}", description=command.__doc__)
    command.add_arguments(parser)
    parser.add_argument("--debug", action="store_true", help="Show a traceback with an error.")
    args, rest = parser.parse_known_args(arguments[1:])
    getattr(args, "parser", parser).refuse_unknown(
        rest
    )  # a command with commands of its own says whose flags they are
    status: int = command.run(args)
    return status


def _is_explained(error: Exception) -> bool:
    """Whether the message is meant for the user: our own errors, and those of the parts that stand below us."""
    if isinstance(error, CompilerLLMError):
        return True
    from compilerllm.ir.errors import IRError
    from compilerllm.kernels.errors import KernelError

    return isinstance(error, IRError | KernelError)
