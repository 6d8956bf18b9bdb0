"""The environment variables that are read, all of them. Everything else is a flag or a field."""

import os
from pathlib import Path

from compilerllm.errors import CompilerLLMError

CACHE_DIR = "COMPILERLLM_CACHE_DIR"
NUM_THREADS = "COMPILERLLM_NUM_THREADS"
API_KEY = "COMPILERLLM_API_KEY"
_VLLM_API_KEY = "VLLM_API_KEY"
# Variables of vLLM's -> what there is in place of each.
_INSTEAD = {
    _VLLM_API_KEY: f"{API_KEY}, --api-key or --api-key-file",
    "VLLM_PORT": "--port",
    "VLLM_HOST_IP": "--host",
    "VLLM_LOGGING_LEVEL": "--log-level",
    "VLLM_LOG_STATS_INTERVAL": "--stats-interval",
    "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "--keep-alive-timeout",
    "VLLM_CACHE_ROOT": CACHE_DIR,
    "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "--otlp-traces-endpoint",
}


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


def unread() -> dict[str, str]:
    """Variables that are set and not read here, though vLLM reads them -> what is in place of each."""
    return {name: instead for name, instead in _INSTEAD.items() if os.environ.get(name)}


def refuse_unread_key() -> None:
    """Raise ``InvalidEnvironment`` if a key was meant for the server that it does not read: it would be open."""
    if os.environ.get(_VLLM_API_KEY):
        raise InvalidEnvironment(
            f"{_VLLM_API_KEY} is set, but is not read here, and there is no other key: the server would be open. Give the "
            f"key as {_INSTEAD[_VLLM_API_KEY]}, or unset it."
        )
