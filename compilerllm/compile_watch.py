"""Counts compilations asked for by this process, so that a warm server can show that there are none.

An audit hook sees every process that is started and every module that is imported; what starts a build in a child
process says so itself. A hook cannot be taken away again, so ``watch`` installs it once a process. Counters are of the
process: a server adds its own to its engine's.
"""

import logging
import os
import re
import shlex
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

log = logging.getLogger(__name__)

CHILD_BUILD, CPP, NVCC, TRITON, INDUCTOR = "child build", "c++", "nvcc", "triton", "inductor"
KINDS = (CHILD_BUILD, CPP, TRITON, NVCC, INDUCTOR)
_CPP_NAME = re.compile(r"(?:[\w.]+-)*(?:gcc|g\+\+|cc|c\+\+|cc1|cc1plus|clang|clang\+\+|icpx?)(?:-[\d.]+)?$")
_NVIDIA_NAME = re.compile(r"(?:nvcc|cicc|ptxas|fatbinary|nvlink)(?:-[\d.]+)?$")
_SHELLS = frozenset({"sh", "bash", "dash", "zsh"})
_COMMAND_ENDS = re.compile(r"[;|&()\n]+")
# Importing one of these means that code will be generated. The rest of torch and triton's metadata mean nothing.
_PACKAGES = {"triton": TRITON, "torch._inductor": INDUCTOR, "torch._dynamo": INDUCTOR}

_lock = threading.Lock()
_counts: dict[str, int] = dict.fromkeys(KINDS, 0)
_imported: set[str] = set()
_watching = threading.Event()
_here = threading.local()  # asked_for: what this thread does; popen: the command it has last given to Popen


def watch() -> None:
    """Begin to count, if this process does not yet."""
    with _lock:
        if _watching.is_set():
            return
        _watching.set()
    _imported.update(name for name in _PACKAGES if name in sys.modules)
    sys.addaudithook(_see)


def counts() -> dict[str, int]:
    """Events of this process by kind since ``watch``, zeros included."""
    with _lock:
        return dict(_counts)


def note(kind: str, what: str) -> None:
    """Count one event; the log names it, and what asked for it."""
    with _lock:
        _counts[kind] += 1
    asked = getattr(_here, "asked_for", "") or "the process"
    # A build of our own is what a first start does; anything else should not be.
    log.log(
        logging.INFO if kind == CHILD_BUILD else logging.WARNING,
        "Compile event (%s): %s, asked for by %s.", kind, what, asked,
    )  # fmt: skip


@contextmanager
def asked_for_by(what: str) -> Iterator[None]:
    """Events of this thread inside are said to be asked for by ``what``."""
    before = getattr(_here, "asked_for", "")
    _here.asked_for = what
    try:
        yield
    finally:
        _here.asked_for = before


def add(*several: Mapping[str, int]) -> dict[str, int]:
    """Counts of several processes together."""
    return {kind: sum(c.get(kind, 0) for c in several) for kind in KINDS}


def text(counted: Mapping[str, int] | None = None) -> str:
    """``0``, or ``3 (c++ 2, triton 1)``; of this process by default."""
    found = {kind: n for kind, n in (counts() if counted is None else counted).items() if n}
    kinds = ", ".join(f"{kind} {n}" for kind, n in found.items())
    return f"{sum(found.values())} ({kinds})" if found else "0"


def kind_of(command: Sequence[str]) -> str | None:
    """Which kind of compiler a command line starts, if any; a shell's by the commands in its text."""
    if not command:
        return None
    name = os.path.basename(command[0])
    if name in _SHELLS and "-c" in command[:-1]:
        text = command[command.index("-c") + 1]
        kinds = (kind_of(_words(part)) for part in _COMMAND_ENDS.split(text))
        return next((kind for kind in kinds if kind), None)
    if _CPP_NAME.fullmatch(name):
        return CPP
    return NVCC if _NVIDIA_NAME.fullmatch(name) else None


def _words(text: str) -> list[str]:
    try:
        words = shlex.split(text)
    except ValueError:  # unbalanced quotes: whatever it is, its first word is the command
        words = text.split()
    while words and ("=" in words[0] or words[0] in ("exec", "env", "time")):
        words.pop(0)
    return words


def _see(event: str, arguments: tuple[Any, ...]) -> None:
    """The audit hook. It is called for every file that is opened, so it leaves at once for what it does not know."""
    if event == "import":
        _see_import(str(arguments[0]))
    elif event in ("subprocess.Popen", "os.posix_spawn", "os.exec"):
        _see_process(event, arguments[0], arguments[1])
    elif event == "os.system":
        _see_process(event, "/bin/sh", ["sh", "-c", os.fsdecode(arguments[0])])


def _see_import(name: str) -> None:
    for package, kind in _PACKAGES.items():
        if (name == package or name.startswith(package + ".")) and package not in _imported:
            _imported.add(package)
            note(kind, f"import of {name}")


def _see_process(event: str, executable: Any, given: Any) -> None:
    listed = [given] if isinstance(given, str | bytes | os.PathLike) else list(given or ())
    command = [os.fsdecode(word) for word in listed] or [os.fsdecode(executable)]
    before, _here.popen = getattr(_here, "popen", None), command if event == "subprocess.Popen" else None
    if event == "os.posix_spawn" and before == command:
        return  # one process, which Popen starts this way
    kind = kind_of(command)
    if kind is None and executable is not None:  # argv[0] may say anything
        kind = kind_of([os.fsdecode(executable)])
    if kind is not None:
        note(kind, " ".join(command)[:200])
