"""What the server is told. ``help`` in a field's metadata is its flag's help text."""

from dataclasses import dataclass, field
from typing import Any

from compilerllm.errors import InvalidParameter


def _option(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True)
class ServerConfig:
    """Where and how the server listens. Raises ``InvalidParameter`` naming the flag."""

    host: str = _option("127.0.0.1", "Address to listen on; 0.0.0.0 is every interface of this machine.")
    port: int = _option(8000, "Port to listen on; 0 takes a free one.")
    api_key: str | None = _option(None, "Key that clients of /v1 must send (Authorization: Bearer KEY).")
    max_body_bytes: int = _option(32 << 20, "Largest request body in bytes; larger ones get 413.")
    tokenizer_threads: int = _option(2, "Threads that validate, render and tokenize requests.")
    shutdown_timeout: int = _option(30, "Seconds that open requests have to finish after SIGTERM.")
    trust_request_chat_template: bool = _option(
        False, "Let requests bring a chat template of their own (chat_template); it runs in the sandbox."
    )
    access_log: bool = _option(False, "Log a line for each request.")

    def __post_init__(self) -> None:
        _check(0 <= self.port <= 65535, "port", self.port, "from 0 to 65535")
        _check(self.max_body_bytes >= 1024, "max_body_bytes", self.max_body_bytes, "at least 1024")
        _check(self.tokenizer_threads >= 1, "tokenizer_threads", self.tokenizer_threads, "at least 1")
        _check(self.shutdown_timeout >= 0, "shutdown_timeout", self.shutdown_timeout, "at least 0")
        _check(self.api_key is None or self.api_key.strip() != "", "api_key", "", "a non-empty key")


def _check(ok: bool, name: str, value: object, need: str) -> None:
    if not ok:
        raise InvalidParameter(f"--{name.replace('_', '-')} must be {need}, but is {value!r}.", name)
