"""Listening and shutting down: what stands between the application and the operating system."""

import logging
import os
import signal
import socket
from types import FrameType

import uvicorn
from fastapi import FastAPI

from compilerllm.server.config import ServerConfig
from compilerllm.server.errors import PortInUse

log = logging.getLogger("compilerllm.server")


def bind(config: ServerConfig) -> socket.socket:
    """Take the port, before the model is loaded: a taken port is told at once. Raises ``PortInUse``."""
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


def listen(listener: socket.socket, config: ServerConfig) -> None:
    """Begin to take connections. Raises ``PortInUse`` where another server, bound as we are, was ready first."""
    try:
        listener.listen(1024)
    except OSError as error:
        raise PortInUse(config.host, config.port, _reason(error)) from error


def _reason(error: OSError) -> str:
    return os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)


def address_of(listener: socket.socket) -> str:
    """The URL that clients on this machine can use."""
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{host}:{port}"


class _Server(uvicorn.Server):
    """Says what it waits for at the end, and ends the application in order also when that is cut short."""

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if count := len(self.server_state.tasks):
            log.info(
                "Shutting down: %d open requests have %s s to finish. Ctrl-C again ends them now.",
                count,
                self.config.timeout_graceful_shutdown,
            )
        await super().shutdown(sockets)
        if self.force_exit:  # uvicorn would leave the application's tasks to be cancelled, and log that
            await self.lifespan.shutdown()


def make_server(app: FastAPI, config: ServerConfig) -> uvicorn.Server:
    return _Server(
        uvicorn.Config(
            app,
            loop="auto",  # uvloop where it is installed
            lifespan="on",
            log_level="info" if config.access_log else "warning",
            access_log=config.access_log,
            timeout_graceful_shutdown=config.shutdown_timeout,
            server_header=False,
        )
    )


def run(app: FastAPI, listener: socket.socket, config: ServerConfig) -> None:
    """Serve until SIGTERM or SIGINT: then no new connection is taken and open requests may finish."""
    make_server(app, config).run(sockets=[listener])


def exit_on_sigterm() -> None:
    """Make SIGTERM unwind the stack and leave with status 0, so that the engine's process is ended too.

    uvicorn handles the signal while it serves, and raises it again afterwards.
    """

    def leave(_: int, __: FrameType | None) -> None:
        raise SystemExit(0)

    signal.signal(signal.SIGTERM, leave)
