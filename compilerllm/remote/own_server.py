"""A server of one's own: ``compilerllm serve`` as a child process on a free port, for as long as a command needs one."""

import dataclasses
import re
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import IO, Any

from compilerllm.config import CONFIG_PARTS, flag_of
from compilerllm.errors import CompilerLLMError

_STOP_SECONDS = 15.0


class ServerDidNotStart(CompilerLLMError):
    """The child ended before it listened; it has said why."""

    def __init__(self, status: int) -> None:
        super().__init__(
            f"the server ended with status {status} before it listened; what it said stands above"
        )


def engine_flags(options: dict[str, Any], given: set[str]) -> list[str]:
    """The flags that were given, as words of a command line. options: fields of the engine's parts by name."""
    words: list[str] = []
    for field in (f for part in CONFIG_PARTS.values() for f in dataclasses.fields(part)):
        if field.name not in given or field.name == "model" or field.name not in options:
            continue
        value, flag = options[field.name], flag_of(field.name)
        if isinstance(value, bool):
            words.append(flag if value else flag.replace("--", "--no-", 1))
        else:
            words += [flag, str(value)]
    return words


@contextmanager
def own_server(model: str | None, flags: Sequence[str] = ()) -> Iterator[str]:
    """The URL (with /v1) of a server for ``model``, which ends with the block. Raises ``ServerDidNotStart``.

    What it prints goes to standard error. model: None is the demo's.
    """
    words = [*([model] if model else []), "--host", "127.0.0.1", "--port", "0", *flags]
    command = [sys.executable, "-m", "compilerllm", "serve", *words]
    # In a group of its own: Ctrl-C is for us, who then end it in order.
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if found := re.match(r"listening: +(\S+)", line):
                break
            print(line, end="", file=sys.stderr, flush=True)
        else:
            raise ServerDidNotStart(process.wait())
        threading.Thread(target=_relay, args=(process.stdout,), daemon=True).start()
        yield found[1]
    finally:
        process.terminate()
        try:
            process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _relay(output: IO[str]) -> None:
    for line in output:
        print(line, end="", file=sys.stderr, flush=True)
