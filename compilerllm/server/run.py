"""Listening, draining and ending: what stands between the application and the operating system."""

import asyncio
import contextlib
import functools
import gc
import logging
import os
import signal
import socket
import stat
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI

from compilerllm import environment
from compilerllm.server.auth import KeyRing
from compilerllm.server.config import ServerConfig
from compilerllm.server.connection import Connection
from compilerllm.server.errors import PortInUse
from compilerllm.server.limits import Gate
from compilerllm.server.request_log import RequestLog
from compilerllm.server.tls import Certificate
from compilerllm.server.tracing import open_tracing

log = logging.getLogger("compilerllm.server")


def bind(config: ServerConfig) -> socket.socket:
    """Take the port, or the Unix socket, before the model is loaded: a taken one is told at once. Raises ``PortInUse``."""
    if config.uds is not None:
        return _bind_unix(config.uds)
    try:
        family, _, _, _, address = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:
        raise PortInUse(config.host, config.port, _reason(error)) from error
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise PortInUse(config.host, config.port, _reason(error)) from error
    return listener


def _bind_unix(path: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _remove_stale(path)
        listener.bind(path)
        os.chmod(path, 0o660)
    except OSError as error:
        listener.close()
        raise PortInUse("unix", path, _reason(error)) from error
    return listener


def _remove_stale(path: str) -> None:
    """Remove a socket that a killed server left. One that a server listens on, and any other file, stays."""
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(os.stat(path).st_mode):
            return
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            try:
                probe.connect(path)
            except ConnectionRefusedError:
                os.unlink(path)


def listen(listener: socket.socket, config: ServerConfig) -> None:
    """Begin to take connections. Raises ``PortInUse`` where another server, bound as we are, was ready first."""
    try:
        listener.listen(1024)
    except OSError as error:
        raise PortInUse(config.host, config.port, _reason(error)) from error


def _reason(error: OSError) -> str:
    return os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)


def address_of(listener: socket.socket, config: ServerConfig | None = None) -> str:
    """The URL that clients on this machine can use; of a Unix socket its path."""
    if listener.family == socket.AF_UNIX:
        return f"unix:{listener.getsockname()}"
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"{'https' if config and config.ssl_certfile else 'http'}://{host}:{port}"


def check_files(config: ServerConfig) -> None:
    """Find out before the model is loaded whether keys, certificate and request log are of use. Raises what they raise."""
    keys = KeyRing(config)
    here = config.uds is not None or config.host in ("localhost", "::1") or config.host.startswith("127.")
    if not keys and not here and config.ssl_cert_reqs != "required":
        log.warning(
            "There is no API key: whoever can reach %s may use the server (--api-key-file).", config.host
        )
    for name, instead in environment.unread().items():
        log.warning("%s is set, but not read here; there is %s.", name, instead)
    if config.ssl_certfile is not None:
        Certificate(config)
    if config.request_log is not None:
        RequestLog(config).close()
    if config.otlp_traces_endpoint is not None:
        open_tracing(config.otlp_traces_endpoint, "").close()


class _Server(uvicorn.Server):
    """Drains before it ends: probes still get an answer (503), new requests are refused, open ones may finish."""

    def __init__(self, config: uvicorn.Config, gate: Gate, seconds: int, reload: Callable[[], None]) -> None:
        super().__init__(config)
        self._terminal = _has_terminal()
        self._gate, self._seconds, self._reload = gate, seconds, reload
        self._drain_until: float | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if threading.current_thread() is threading.main_thread():  # the process is ours
            gc.collect()
            gc.freeze()  # a collection that looks at all modules' objects would stop every stream for 80 ms
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self._hang_up)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal begins to drain; a second Ctrl-C ends at once."""
        self._captured_signals.append(sig)
        if self._drain_until is None:
            self._drain_until = time.monotonic() + self._seconds
            self._gate.draining = True
            self._say()
        elif sig == signal.SIGINT:
            self.should_exit = self.force_exit = True

    def _hang_up(self) -> None:
        """SIGHUP: read files anew; but if the terminal we were started from has closed, end."""
        if self._terminal and not _has_terminal():
            self.handle_exit(signal.SIGTERM, None)
        else:
            self._reload()

    async def on_tick(self, counter: int) -> bool:
        if await super().on_tick(counter):
            return True
        if self._drain_until is None:
            return False
        left = self._drain_until - time.monotonic()
        self.config.timeout_graceful_shutdown = max(0, round(left))
        return self._gate.num_open == 0 or left <= 0

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets)
        if self.force_exit:  # uvicorn would leave the application's tasks to be cancelled, and log that
            await self.lifespan.shutdown()

    def _say(self) -> None:
        if count := self._gate.num_open:
            text = "Shutting down: %d open requests have %s s to finish. Ctrl-C again ends them now."
            log.info(text, count, self._seconds)


def make_server(app: FastAPI, config: ServerConfig) -> uvicorn.Server:
    certificate = None if config.ssl_certfile is None else Certificate(config)
    connection: Any = functools.partial(Connection, limits=config)
    settings = uvicorn.Config(
        app,
        http=connection,
        ws="none",
        loop="auto",  # uvloop where it is installed
        lifespan="on",
        log_config=None,
        log_level="error",  # a port scan is no reason for a line each
        access_log=False,  # ours has the requests' ids
        root_path=config.root_path,
        h11_max_incomplete_event_size=config.max_header_bytes,
        timeout_keep_alive=config.keep_alive_timeout,
        timeout_graceful_shutdown=config.shutdown_timeout,
        server_header=False,
        ssl_context_factory=None if certificate is None else lambda *_: certificate.context,
    )

    def reload() -> None:
        app.state.reload()
        if certificate is not None:
            certificate.reload()

    return _Server(settings, app.state.gate, config.shutdown_timeout, reload)


def run(app: FastAPI, listener: socket.socket, config: ServerConfig) -> None:
    """Serve until SIGTERM or SIGINT: then no new request is taken and open ones may finish."""
    try:
        make_server(app, config).run(sockets=[listener])
    finally:
        if config.uds is not None:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(config.uds)


def exit_on_sigterm() -> None:
    """Make SIGTERM unwind the stack and leave with status 0, so that the engine's process is ended too. SIGHUP, which
    reads files anew once the server serves, must not end it before, unless its terminal has closed.

    uvicorn handles the signals while it serves, and raises them again afterwards.
    """
    terminal = _has_terminal()

    def leave(_: int, __: FrameType | None) -> None:
        raise SystemExit(0)

    def leave_if_hung_up(_: int, __: FrameType | None) -> None:
        if terminal and not _has_terminal():
            raise SystemExit(0)

    signal.signal(signal.SIGTERM, leave)
    signal.signal(signal.SIGHUP, leave_if_hung_up)


def _has_terminal() -> bool:
    """Whether this process has a terminal that controls it."""
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY))
    except OSError:
        return False
    return True
