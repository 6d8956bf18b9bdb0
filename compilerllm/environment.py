"""The environment variables that are read, all of them. Everything else is a flag or a field."""

import os
from pathlib import Path

from compilerllm.errors import CompilerLLMError

CACHE_DIR = "COMPILERLLM_CACHE_DIR"
NUM_THREADS = "COMPILERLLM_NUM_THREADS"


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
