"""API keys: who may ask. A plain ASGI middleware, so that streamed responses pass through it untouched."""

import hashlib
import hmac
import logging
import os
from pathlib import Path

from starlette._utils import get_route_path
from starlette.types import ASGIApp, Receive, Scope, Send

from compilerllm import environment
from compilerllm.errors import CompilerLLMError
from compilerllm.server.config import ServerConfig
from compilerllm.server.errors import unauthorized
from compilerllm.server.records import current_record

log = logging.getLogger("compilerllm.server")

PROBES = frozenset(
    ("/health", "/ping", "/ready", "/readyz", "/live", "/livez", "/version", "/load", "/metrics")
)
DOCUMENTS = frozenset(("/docs", "/docs/oauth2-redirect", "/redoc", "/openapi.json"))
OPEN_PATHS = PROBES | DOCUMENTS  # every other path is guarded and counted, also one that is added later


class InvalidKeyFile(CompilerLLMError):
    """``--api-key-file`` cannot be read, or has no key."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(
            f"--api-key-file {path}: {reason}. It has a key a line; lines that begin with # are comments."
        )


class KeyRing:
    """The valid keys, as digests: of flags and environment, which stay, and of the file, which can be read anew."""

    def __init__(self, config: ServerConfig) -> None:
        """Raises ``InvalidKeyFile``, ``InvalidEnvironment``."""
        named = [*config.api_key, *filter(None, [environment.api_key()])]
        self._fixed = [_digest(key.strip().encode()) for key in named]
        self._file = config.api_key_file
        self._digests = [*self._fixed, *self._read_file()]
        if not self._digests:
            environment.refuse_unread_key()

    def __len__(self) -> int:
        return len(self._digests)

    def reload(self) -> None:
        """Read the file anew. What it cannot give, it does not change: the old keys stay, and the log says why."""
        if self._file is None:
            return
        try:
            self._digests = [*self._fixed, *self._read_file()]
        except InvalidKeyFile as error:
            log.error("The API keys stay as they were: %s", error)
        else:
            log.info("Read the API keys anew: there are %d.", len(self._digests))

    def find(self, key: bytes) -> str | None:
        """The key's fingerprint, by which logs call it; None if the key is not valid. Takes as long for every key."""
        sent = _digest(key.strip())
        found = [hmac.compare_digest(sent, digest) for digest in self._digests]
        return sent.hex()[:8] if any(found) else None

    def _read_file(self) -> list[bytes]:
        if self._file is None:
            return []
        try:
            lines = [line.strip() for line in Path(self._file).read_text().splitlines()]
        except OSError as error:
            raise InvalidKeyFile(self._file, os.strerror(error.errno or 0)) from error
        except UnicodeDecodeError as error:
            raise InvalidKeyFile(self._file, "is not UTF-8 text") from error
        keys = [line for line in lines if line and not line.startswith("#")]
        if not keys:
            raise InvalidKeyFile(self._file, "has no key")
        return [_digest(key.encode()) for key in keys]


class RequireKey:
    """Lets requests through only with a key, but for ``OPEN_PATHS``. Without keys it lets all through."""

    def __init__(self, app: ASGIApp, keys: KeyRing) -> None:
        self._app, self._keys = app, keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and len(self._keys) and get_route_path(scope) not in OPEN_PATHS:
            label = self._find(scope)
            if label is None:
                await unauthorized(get_route_path(scope))(scope, receive, send)
                return
            if record := current_record():
                record.key = label
        await self._app(scope, receive, send)

    def _find(self, scope: Scope) -> str | None:
        for name, value in scope["headers"]:
            if name == b"x-api-key":
                return self._keys.find(value)
            if name == b"authorization":
                scheme, _, key = value.partition(b" ")
                return self._keys.find(key) if scheme.lower() == b"bearer" else None
        return None


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
