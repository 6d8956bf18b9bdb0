"""What the server is told, a dataclass a part. ``help`` in a field's metadata is its flag's help text."""

from dataclasses import dataclass, field
from typing import Any, Literal

from compilerllm.errors import InvalidParameter
from compilerllm.parsing.choose import choose_format

LOG_LEVELS = ("debug", "info", "warning", "error")
LOG_REQUESTS = ("off", "metadata", "full")
CERT_REQS = ("none", "optional", "required")


def _option(default: Any, text: str, **metadata: Any) -> Any:
    return field(default=default, metadata={"help": text, **metadata})


class _Part:
    """The end of the chain of checks."""

    def __post_init__(self) -> None:
        return None


@dataclass(frozen=True)
class ListenConfig(_Part):
    """Where the server listens, and over what."""

    host: str = _option("127.0.0.1", "Address to listen on; 0.0.0.0 is every interface of this machine.")
    port: int = _option(8000, "Port to listen on; 0 takes a free one.")
    uds: str | None = _option(None, "Listen on this Unix socket in place of a port; a file with mode 660.")
    root_path: str = _option(
        "", "Path under which a proxy in front shows this server, such as /llm; the proxy strips it."
    )
    ssl_certfile: str | None = _option(
        None, "Certificate (PEM, with its chain): serve HTTPS. SIGHUP reads it and its key anew."
    )
    ssl_keyfile: str | None = _option(
        None, "Private key of --ssl-certfile, where that file does not have it."
    )
    ssl_ca_certs: str | None = _option(
        None, "Certificates (PEM) that clients' certificates are checked with."
    )
    ssl_cert_reqs: Literal["none", "optional", "required"] = _option(
        "none", "Whether clients must show a certificate that --ssl-ca-certs knows."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        _check(0 <= self.port <= 65535, "port", self.port, "from 0 to 65535")
        _check(self.uds != "", "uds", self.uds, "a path")
        path = self.root_path
        _check(path == "" or (path[0] == "/" and path[-1] != "/"), "root_path", path, "a path such as /llm")
        _check(self.ssl_cert_reqs in CERT_REQS, "ssl_cert_reqs", self.ssl_cert_reqs, _one_of(CERT_REQS))
        if self.ssl_certfile is None:
            for name in ("ssl_keyfile", "ssl_ca_certs"):
                _check(getattr(self, name) is None, name, getattr(self, name), "given with --ssl-certfile")
        needs = self.ssl_cert_reqs != "none"
        _check(
            not needs or self.ssl_ca_certs is not None,
            "ssl_cert_reqs",
            self.ssl_cert_reqs,
            "none without --ssl-ca-certs",
        )


@dataclass(frozen=True)
class AccessConfig(_Part):
    """Who may ask."""

    api_key: tuple[str, ...] = _option(
        (), "Key that clients must send (Authorization: Bearer KEY, or x-api-key: KEY); may be repeated."
    )
    api_key_file: str | None = _option(
        None, "File of keys, one a line; # begins a comment. SIGHUP reads it anew, no request is dropped."
    )
    allowed_origins: tuple[str, ...] = _option(
        (), "Origins whose pages may ask from a browser (CORS), separated by commas; * is all.", commas=True
    )
    allowed_methods: tuple[str, ...] = _option(
        ("GET", "POST"), "Methods that such pages may use, separated by commas.", commas=True
    )
    allowed_headers: tuple[str, ...] = _option(
        ("*",), "Headers that such pages may send, separated by commas.", commas=True
    )
    allow_credentials: bool = _option(False, "Let such pages send cookies and the like.")
    disable_fastapi_docs: bool = _option(False, "Do not serve /docs, /redoc and /openapi.json.")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("api_key", "allowed_origins", "allowed_methods", "allowed_headers"):
            value = getattr(self, name)
            fine = isinstance(value, tuple) and all(isinstance(v, str) and v.strip() for v in value)
            _check(fine, name, "" if name == "api_key" else value, "a tuple of non-empty texts")
        every = self.allow_credentials and "*" in self.allowed_origins
        _check(not every, "allow_credentials", True, "off where every origin is allowed: name the origins")


@dataclass(frozen=True)
class LimitsConfig(_Part):
    """How much one client, or all of them, can take."""

    max_body_bytes: int = _option(32 << 20, "Largest request body in bytes; larger ones get 413.")
    max_header_bytes: int = _option(
        64 << 10, "Largest request line and headers in bytes; larger ones get 431."
    )
    max_concurrent_requests: int | None = _option(
        None, "Most requests answered at once; more get 429. By default no limit (see --max-num-waiting)."
    )
    header_timeout: float = _option(20.0, "Seconds in which a request's headers must have come whole.")
    body_timeout: float = _option(60.0, "Seconds in which a request's body must have come whole; else 408.")
    send_timeout: float = _option(
        60.0, "Seconds that a client may leave an answer unread before its connection is cut."
    )
    max_unread_steps: int = _option(
        16384, "Most steps of one stream that wait for a client that does not read; then the stream is ended."
    )
    keep_alive_timeout: int = _option(
        5, "Seconds that a connection may idle between requests; give it more than the proxy in front."
    )
    shutdown_timeout: int = _option(30, "Seconds that open requests have to finish after SIGTERM.")
    tokenizer_threads: int = _option(2, "Threads that validate, render and tokenize requests.")

    def __post_init__(self) -> None:
        super().__post_init__()
        _check(self.max_body_bytes >= 1024, "max_body_bytes", self.max_body_bytes, "at least 1024")
        _check(self.max_header_bytes >= 1024, "max_header_bytes", self.max_header_bytes, "at least 1024")
        most = self.max_concurrent_requests
        _check(most is None or most >= 1, "max_concurrent_requests", most, "at least 1")
        for name in ("header_timeout", "body_timeout", "send_timeout"):
            _check(getattr(self, name) > 0, name, getattr(self, name), "above 0")
        _check(self.max_unread_steps >= 1, "max_unread_steps", self.max_unread_steps, "at least 1")
        _check(self.keep_alive_timeout >= 1, "keep_alive_timeout", self.keep_alive_timeout, "at least 1")
        _check(self.shutdown_timeout >= 0, "shutdown_timeout", self.shutdown_timeout, "at least 0")
        _check(self.tokenizer_threads >= 1, "tokenizer_threads", self.tokenizer_threads, "at least 1")


@dataclass(frozen=True)
class LogConfig(_Part):
    """What the server tells of its work: logs, metrics, traces."""

    log_level: Literal["debug", "info", "warning", "error"] = _option("info", "Least important lines to log.")
    access_log: bool = _option(
        False, "Log a line for each request; those of probes only at --log-level debug."
    )
    stats_interval: float = _option(
        10.0, "Seconds between lines on throughput, queue and KV cache; none while idle; 0 turns them off."
    )
    log_requests: Literal["off", "metadata", "full"] = _option(
        "off",
        "Write a JSON line for each request: metadata leaves out all texts, full has both bodies. Keys are never written.",
    )
    request_log: str | None = _option(
        None, "File for these lines, appended to and opened anew on SIGHUP; by default the log itself."
    )
    request_log_bytes: int = _option(1 << 20, "Most bytes of a body that is looked at for these lines.")
    vllm_metric_names: bool = _option(
        False, "Publish metrics under vLLM's names too (vllm:...), so that existing dashboards work."
    )
    otlp_traces_endpoint: str | None = _option(
        None,
        "Send OpenTelemetry traces there (OTLP over HTTP), such as http://collector:4318/v1/traces; needs "
        "compilerllm[tracing].",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        _check(self.log_level in LOG_LEVELS, "log_level", self.log_level, _one_of(LOG_LEVELS))
        _check(self.log_requests in LOG_REQUESTS, "log_requests", self.log_requests, _one_of(LOG_REQUESTS))
        _check(self.stats_interval >= 0, "stats_interval", self.stats_interval, "at least 0")
        _check(self.request_log_bytes >= 0, "request_log_bytes", self.request_log_bytes, "at least 0")
        off = self.log_requests == "off" and self.request_log is not None
        _check(not off, "request_log", self.request_log, "given with --log-requests metadata or full")
        url = self.otlp_traces_endpoint
        _check(
            url is None or url.startswith(("http://", "https://")),
            "otlp_traces_endpoint",
            url,
            "a URL such as http://collector:4318/v1/traces (OTLP over HTTP, not gRPC)",
        )


@dataclass(frozen=True)
class ApiConfig(_Part):
    """What requests may ask for."""

    reasoning_parser: str = _option(
        "auto",
        "How the model marks its thoughts, such as qwen3 or deepseek_r1 (docs/server.md lists them); auto goes by its chat "
        "template, none leaves them in the answer.",
    )
    tool_call_parser: str = _option(
        "auto",
        "How the model marks calls of tools, such as hermes or llama3_json (docs/server.md lists them); auto goes by its "
        "chat template, none leaves them in the answer.",
    )
    trust_request_chat_template: bool = _option(
        False, "Let requests bring a chat template of their own (chat_template); it runs in the sandbox."
    )
    responses_store_bytes: int = _option(
        64 << 20,
        "Memory in bytes for stored responses (/v1/responses); the longest unused make room. 0 stores none.",
    )
    enable_tokenizer_info_endpoint: bool = _option(
        False, "Serve /tokenizer_info, which tells the tokenizer's configuration and chat template."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        choose_format(self.reasoning_parser, self.tool_call_parser, "")  # raises for a name that there is not
        size = self.responses_store_bytes
        _check(size >= 0, "responses_store_bytes", size, "at least 0")


@dataclass(frozen=True)
class ServerConfig(ListenConfig, AccessConfig, LimitsConfig, LogConfig, ApiConfig):
    """All of it, flat. Raises ``InvalidParameter`` naming the flag."""


# Part -> its title in the help.
SERVER_PARTS: dict[type[Any], str] = {
    ListenConfig: "where it listens",
    AccessConfig: "who may ask",
    LimitsConfig: "limits",
    LogConfig: "logs, metrics, traces",
    ApiConfig: "what requests may ask for",
}


def _check(ok: bool, name: str, value: object, need: str) -> None:
    if not ok:
        raise InvalidParameter(f"--{name.replace('_', '-')} must be {need}, but is {value!r}.", name)


def _one_of(names: tuple[str, ...]) -> str:
    return "one of " + ", ".join(names)
