"""The API key: a plain ASGI middleware, so that streamed responses pass through it untouched."""

import hashlib
import hmac

from starlette.types import ASGIApp, Receive, Scope, Send

from compilerllm.server.errors import unauthorized


class RequireKey:
    """Lets requests under /v1 through only with the key. Health and metrics stay open, for probes."""

    def __init__(self, app: ASGIApp, api_key: str) -> None:
        self._app = app
        self._digest = _digest(api_key.encode())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].startswith("/v1") and not self._allows(scope):
            await unauthorized()(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _allows(self, scope: Scope) -> bool:
        sent = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        scheme, _, key = sent.partition(b" ")
        # Digests have one length, so that the time of the comparison tells nothing of the key's.
        return hmac.compare_digest(_digest(key.strip()), self._digest) and scheme.lower() == b"bearer"


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
