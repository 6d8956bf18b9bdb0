"""Every refusal with the right HTTP status, in the shape of the API that was asked.

OpenAI's is {"error": {"message", "type", "param", "code"}}; Anthropic's, of all paths under /v1/messages, is
{"type": "error", "error": {"type", "message"}}.
"""

import logging
from dataclasses import dataclass
from typing import Any

import msgspec
from fastapi import FastAPI
from starlette._utils import get_route_path
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from compilerllm.errors import (
    CompilerLLMError,
    ContextLengthExceeded,
    EngineDead,
    GenerationFailed,
    InvalidParameter,
    QueueFull,
)

log = logging.getLogger("compilerllm.server")


class PortInUse(CompilerLLMError):
    """The server cannot listen where it was told to."""

    def __init__(self, host: str, port: int | str, reason: str) -> None:
        super().__init__(
            f"Cannot listen on {host}:{port}: {reason}. Choose another place with --host and --port, or --uds."
        )


class MalformedBody(InvalidParameter):
    """A request body is no JSON object."""


class UnknownField(InvalidParameter):
    """A request has a field that the route does not know, or cannot do yet."""


class BodyTooLarge(InvalidParameter):
    """A request body is larger than ``--max-body-bytes``."""

    def __init__(self, limit: int) -> None:
        super().__init__(
            f"The request body is larger than {limit} bytes; send less, or serve with --max-body-bytes."
        )


class MalformedRequest(CompilerLLMError):
    """What a client sent is no HTTP. ``status`` is what the parser makes of it."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(
            message if status != 431 else "The request's headers are too large (--max-header-bytes)."
        )
        self.status = status


class HeadersTooLarge(CompilerLLMError):
    """A request has more headers than any client needs, or larger ones than ``--max-header-bytes``."""

    def __init__(self, number: int, size: int) -> None:
        super().__init__(f"The request has more than {number} headers, or more than {size} bytes of them.")


class BodyTimeout(CompilerLLMError):
    """A request body did not come within ``--body-timeout``."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"The request body did not come whole within {seconds:g} s.")


class TooManyRequests(CompilerLLMError):
    """More requests at once than ``--max-concurrent-requests``."""

    def __init__(self, limit: int) -> None:
        super().__init__(
            f"The server answers {limit} requests already, as many as it may. Try again shortly."
        )


class Draining(CompilerLLMError):
    """The server was told to end and takes no new request."""

    def __init__(self) -> None:
        super().__init__("The server is shutting down and takes no new requests. Send it to another one.")


class ClientTooSlow(CompilerLLMError):
    """A client left more of a stream unread than ``--max-unread-steps``."""

    def __init__(self, limit: int) -> None:
        super().__init__(f"The stream was ended: more than {limit} steps of it waited to be read.")


class CannotServeTLS(CompilerLLMError):
    """The certificate or key of ``--ssl-certfile`` and the flags beside it is of no use."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(
            f"Cannot use the certificate {path}: {reason}. --ssl-certfile and --ssl-keyfile must be PEM files that "
            "belong together, the key without a password."
        )


class CannotWriteRequestLog(CompilerLLMError):
    """``--request-log`` cannot be opened."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"Cannot write --request-log {path}: {reason}.")


class TracingNotInstalled(CompilerLLMError):
    """``--otlp-traces-endpoint`` without the packages that send traces."""

    def __init__(self) -> None:
        super().__init__(
            "--otlp-traces-endpoint needs the OpenTelemetry SDK and its OTLP exporter over HTTP: "
            "pip install 'compilerllm[tracing]'."
        )


class ModelNotFound(InvalidParameter):
    """A request names a model that is not served here."""

    def __init__(self, asked: str, served: str) -> None:
        super().__init__(
            f"The model {asked!r:.200} does not exist here; this server has {served!r}.", "model"
        )


class ResponseNotFound(InvalidParameter):
    """A request names a response that is not stored, or no longer."""

    def __init__(self, response_id: str, param: str) -> None:
        super().__init__(
            f"There is no response {response_id!r:.100} here: it was never stored, or it made room for newer ones "
            "(--responses-store-bytes).",
            param,
        )


@dataclass(frozen=True)
class Refusal:
    """How an error is answered."""

    status: int
    kind: str
    code: str | None
    headers: dict[str, str]


_RETRY = {"Retry-After": "1"}
_CLOSE = {"Connection": "close"}
_REFUSALS: tuple[tuple[type[Exception], Refusal], ...] = (  # the first that fits
    (BodyTooLarge, Refusal(413, "invalid_request_error", "request_too_large", _CLOSE)),
    (HeadersTooLarge, Refusal(431, "invalid_request_error", "headers_too_large", _CLOSE)),
    (BodyTimeout, Refusal(408, "invalid_request_error", "body_timeout", _CLOSE)),
    (TooManyRequests, Refusal(429, "rate_limit_error", "too_many_requests", _RETRY)),
    (ClientTooSlow, Refusal(408, "invalid_request_error", "client_too_slow", _CLOSE)),
    (Draining, Refusal(503, "server_error", "shutting_down", {**_RETRY, **_CLOSE})),
    (ModelNotFound, Refusal(404, "invalid_request_error", "model_not_found", {})),
    (ResponseNotFound, Refusal(404, "invalid_request_error", "response_not_found", {})),
    (ContextLengthExceeded, Refusal(400, "invalid_request_error", "context_length_exceeded", {})),
    (MalformedBody, Refusal(400, "invalid_request_error", "malformed_body", {})),
    (UnknownField, Refusal(400, "invalid_request_error", "unknown_parameter", {})),
    (InvalidParameter, Refusal(400, "invalid_request_error", "invalid_value", {})),
    (QueueFull, Refusal(429, "rate_limit_error", "queue_full", _RETRY)),
    (EngineDead, Refusal(503, "server_error", "engine_unavailable", _RETRY)),
    (GenerationFailed, Refusal(500, "server_error", "generation_failed", {})),
)
_INTERNAL = Refusal(500, "server_error", "internal_error", {})
_HTTP_KINDS = {404: "not_found", 405: "method_not_allowed"}
_ANTHROPIC = "/v1/messages"
_ANTHROPIC_KINDS = {  # HTTP status -> Anthropic's name of it
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large",
    408: "timeout_error", 429: "rate_limit_error", 500: "api_error", 503: "overloaded_error",
}  # fmt: skip


def speaks_anthropic(path: str) -> bool:
    """Whether what is under ``path`` is Anthropic's API."""
    return path == _ANTHROPIC or path.startswith(_ANTHROPIC + "/")


def anthropic_body(status: int, message: str) -> dict[str, Any]:
    """A refusal's JSON in Anthropic's shape."""
    kind = _ANTHROPIC_KINDS.get(status, "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": message}}


def error_body(error: BaseException) -> dict[str, Any]:
    """The error's JSON. What we did not foresee is not shown to clients; it is in the log."""
    refusal = find_refusal(error)
    message = (
        str(error) if refusal is not _INTERNAL else "The server failed at this request; its log says more."
    )
    return _body(message, refusal.kind, getattr(error, "param", None), refusal.code)


def find_refusal(error: BaseException) -> Refusal:
    if isinstance(error, MalformedRequest):
        code = "headers_too_large" if error.status == 431 else "malformed_request"
        return Refusal(error.status, "invalid_request_error", code, _CLOSE)
    return next((refusal for kind, refusal in _REFUSALS if isinstance(error, kind)), _INTERNAL)


def log_unforeseen(error: BaseException) -> None:
    """Log an error that is none of ours: a bug, whose traceback is wanted."""
    if find_refusal(error) is _INTERNAL:
        log.error("A request failed.", exc_info=error)


def error_response(error: BaseException, path: str = "") -> Response:
    """The refusal of a request for ``path``, as that path's API has it."""
    refusal = find_refusal(error)
    log_unforeseen(error)
    return _response(refusal.status, error_body(error), refusal.headers, path)


def unauthorized(path: str) -> Response:
    """The refusal of a request for ``path`` without a valid key."""
    body = _body(
        "A valid API key is needed: send 'Authorization: Bearer KEY', or 'x-api-key: KEY'.",
        "authentication_error",
        None,
        "invalid_api_key",
    )
    return _response(401, body, {"WWW-Authenticate": "Bearer"}, path)


def install_error_handlers(app: FastAPI) -> None:
    async def handle(request: Request, error: Exception) -> Response:
        return error_response(error, get_route_path(request.scope))

    async def handle_http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        message = f"{error.detail}: {request.method} {request.url.path}"
        body = _body(message, "invalid_request_error", None, _HTTP_KINDS.get(error.status_code))
        headers, path = dict(error.headers or {}), get_route_path(request.scope)
        return _response(error.status_code, body, headers, path)

    app.add_exception_handler(CompilerLLMError, handle)
    app.add_exception_handler(HTTPException, handle_http)
    app.add_exception_handler(Exception, handle)


def _body(message: str, kind: str, param: str | None, code: str | None) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def _response(status: int, body: dict[str, Any], headers: dict[str, str], path: str) -> Response:
    if speaks_anthropic(path):
        body = anthropic_body(status, body["error"]["message"])
    return Response(msgspec.json.encode(body), status, headers, "application/json")
