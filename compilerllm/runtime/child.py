"""One life of an engine process, seen from its parent: start, sockets, death. Imports no more than a face needs."""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec
import zmq

from compilerllm.config import EngineConfig
from compilerllm.errors import EngineStartFailed
from compilerllm.runtime.messages import Failed, Inbound, Outbound, Ready

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Outbound).decode
_LONGEST_SOCKET_DIRECTORY = 80  # bytes; a Unix socket's path may have 107


class EngineProcess:
    """A child process and the two sockets to it. Not restarted: a new life is a new object."""

    def __init__(self, config: EngineConfig, factory: str) -> None:
        """Start the process; it loads its model meanwhile (``wait_ready``)."""
        place = tempfile.gettempdir()
        place = place if len(os.fsencode(place)) <= _LONGEST_SOCKET_DIRECTORY else "/tmp"
        self._directory = Path(tempfile.mkdtemp(prefix="compilerllm-", dir=place))  # mode 0700
        start = {"factory": factory, "config": config}
        (self._directory / "start.json").write_bytes(msgspec.json.encode(start))
        self._context = zmq.Context()
        self._inbox = self._bind(zmq.PUSH, "in")
        self._outbox = self._bind(zmq.PULL, "out")
        self._arrival: asyncio.Future[None] | None = None  # of whoever waits in ``receive``
        self._loop: asyncio.AbstractEventLoop | None = None  # watches the outbox, from the first wait on
        self.last_heard = time.monotonic()
        module = [
            "-P",
            "-m",
            "compilerllm.runtime.process",
        ]  # -P: what lies in the working directory is no module
        command = [sys.executable, *module, str(self._directory), str(os.getpid())]
        # A face's standard output is its own; what the child prints belongs to the log.
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=2)

    def _bind(self, kind: int, name: str) -> "zmq.Socket[bytes]":
        socket = self._context.socket(kind)
        socket.set_hwm(0)  # never block, never drop: the number of open requests is bounded elsewhere
        socket.bind(f"ipc://{self._directory}/{name}")
        return socket

    @property
    def pid(self) -> int:
        return self._process.pid

    def ending(self) -> str | None:
        """How the process ended, in words; None while it runs."""
        status = self._process.poll()
        if status is None:
            return None
        if status < 0:
            return f"killed by signal {-status} ({signal.Signals(-status).name})"
        return f"exit status {status}"

    def wait_ready(self, timeout: float | None = None) -> Ready:
        """Block until the engine is up. Raises ``EngineStartFailed`` with the child's own words if it has any."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while (ready := self._poll_ready(100)) is None:
            self._check_deadline(deadline)
        return ready

    async def wait_ready_async(self, timeout: float | None = None) -> Ready:
        """``wait_ready`` for an event loop."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while (ready := self._poll_ready(0)) is None:
            self._check_deadline(deadline)
            await asyncio.sleep(0.02)
        return ready

    def _poll_ready(self, milliseconds: int) -> Ready | None:
        if not self._outbox.poll(milliseconds):
            # Looked at in this order, a last message cannot be overlooked.
            if (ending := self.ending()) is not None and not self._outbox.poll(0):
                raise EngineStartFailed(
                    f"The engine process ended while it started ({ending}). What it printed above may say why; "
                    "signal 9 often means that memory ran out."
                )
            return None
        message = _decode(self._outbox.recv())
        if isinstance(message, Failed):
            raise EngineStartFailed(message.message)
        assert isinstance(message, Ready), f"{message} before ready"
        self.last_heard = time.monotonic()
        return message

    @staticmethod
    def _check_deadline(deadline: float | None) -> None:
        if deadline is not None and time.monotonic() > deadline:
            raise EngineStartFailed(
                "The engine process did not become ready in the time allowed for its start."
            )

    def send(self, message: Inbound) -> None:
        """Queue a message for the child. Never blocks; a dead child's messages vanish with it."""
        self._inbox.send(_encode(message))

    async def receive(self, seconds: float) -> Outbound | None:
        """The next message, or None if none comes within ``seconds``. One that is there is returned without a pause,
        so that who is late gets all that has come before anybody else's turn."""
        try:
            data = self._outbox.recv(zmq.NOBLOCK)
        except zmq.Again:
            await self._wait(seconds)
            try:
                data = self._outbox.recv(zmq.NOBLOCK)
            except zmq.Again:
                return None
        self.last_heard = time.monotonic()
        return _decode(data)

    async def _wait(self, seconds: float) -> None:
        """Until something may have come. What zmq.asyncio does takes longer than decoding a step's message."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._loop.add_reader(self._descriptor, self._wake)
        self._arrival = self._loop.create_future()
        late = self._loop.call_later(seconds, self._wake)
        # The descriptor tells of a change only, and only until the socket is looked at: so look once more.
        if int(self._outbox.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            self._wake()
        try:
            await self._arrival
        finally:
            late.cancel()
            self._arrival = None

    @property
    def _descriptor(self) -> int:
        """Becomes readable when the outbox changes."""
        return int(self._outbox.getsockopt(zmq.FD))

    def _wake(self) -> None:
        if self._arrival is not None and not self._arrival.done():
            self._arrival.set_result(None)

    def close(self) -> None:
        """End the process and remove what it left. Idempotent."""
        if self._process.poll() is None:
            self._process.kill()  # it holds nothing that would have to be saved, and heeds no other signal
            self._process.wait()
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._descriptor)
        self._loop = None
        self._context.destroy(linger=0)
        shutil.rmtree(self._directory, ignore_errors=True)
