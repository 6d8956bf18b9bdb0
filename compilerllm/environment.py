"""The environment variables that are read, all of them. Everything else is a flag or a field."""

import os
from pathlib import Path

from compilerllm.errors import CompilerLLMError

CACHE_DIR = "COMPILERLLM_CACHE_DIR"
NUM_THREADS = "COMPILERLLM_NUM_THREADS"
API_KEY = "COMPILERLLM_API_KEY"


class InvalidEnvironment(CompilerLLMError):
    """A variable with a value it cannot have."""


def cache_dir() -> Path:
    """Where artifacts are kept: ``COMPILERLLM_CACHE_DIR``, or ``~/.cache/compilerllm``."""
    return Path(os.environ.get(CACHE_DIR) or Path.home() / ".cache" / "compilerllm")


def num_threads() -> int:
    """Threads of a step: ``COMPILERLLM_NUM_THREADS``, or the cores this process may use.

    Raises ``InvalidEnvironment`` for what is no number from 1 to 256.
    """
    given = os.environ.get(NUM_THREADS)
    if not given:
        return len(os.sched_getaffinity(0))
    if not given.isdecimal() or not 1 <= int(given) <= 256:
        raise InvalidEnvironment(f"{NUM_THREADS} must be a whole number from 1 to 256, but is {given!r}")
    return int(given)


def api_key() -> str | None:
    """A key that clients may send: ``COMPILERLLM_API_KEY``. Raises ``InvalidEnvironment`` where it is set to nothing,
    since a server that was meant to be guarded would be open.
    """
    given = os.environ.get(API_KEY)
    if given is not None and not given.strip():
        raise InvalidEnvironment(f"{API_KEY} is set but empty: give it a key, or unset it")
    return given
