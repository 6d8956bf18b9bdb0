"""How a face holds an engine: the interface, and the form of it that runs in a process of its own.

The other form is ``engine.InProcessEngine``. This module imports neither numpy nor torch.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Literal, Protocol

from compilerllm.config import EngineConfig
from compilerllm.errors import CompilerLLMError, EngineDead
from compilerllm.runtime.admission import Limits
from compilerllm.runtime.child import EngineProcess
from compilerllm.runtime.messages import Abort, Batch, Delta, Ready, Request, Stats

DEFAULT_FACTORY = "compilerllm.loading:load_engine_model"
Health = Literal["starting", "ready", "restarting", "dead"]

log = logging.getLogger(__name__)


class EngineClient(Protocol):
    """What a face sees of an engine, in its own process or in another."""

    @property
    def ready(self) -> Ready: ...

    @property
    def health(self) -> Health: ...

    def submit(self, request: Request) -> None:
        """Queue a request and return at once. Raises ``InvalidParameter``, ``QueueFull`` or ``EngineDead``."""
        ...

    def abort(self, request_ids: Items[str]) -> None:
        """End requests; each still gets a last delta. Unknown ids are ignored."""
        ...

    def stream(self) -> AsyncIterator[Batch | Stats]:
        """Everything the engine says, for one consumer that dispatches by request id."""
        ...

    def close(self) -> None:
        """End the engine. Idempotent."""
        ...


@dataclass(frozen=True)
class RestartPolicy:
    """When an engine that died is started again: at most ``most`` times within ``window`` seconds.

    The n-th restart within the window waits ``first_delay * 2**(n-1)`` seconds, at most ``longest_delay``.
    """

    most: int = 5
    window: float = 300.0
    first_delay: float = 0.25
    longest_delay: float = 10.0

    def delay(self, deaths: int) -> float | None:
        """Seconds to wait after the given number of deaths within the window; None = give up."""
        if deaths > self.most:
            return None
        return min(self.longest_delay, self.first_delay * 2.0 ** (deaths - 1))


class ProcessEngine:
    """An engine in a child process, restarted from its artifact when it dies.

    ``start`` first, then consume ``stream`` in one task of one event loop, from whose thread ``submit`` and ``abort``
    are called too. A death is noticed within a quarter of a second, a process that is stopped or holds the GIL after
    ``heartbeat_timeout`` seconds. Then every open request gets a last delta with "error", and ``submit`` raises
    ``EngineDead`` until the new process is ready. ``stream`` raises ``EngineDead`` when restarts are used up.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        factory: str = DEFAULT_FACTORY,
        restarts: RestartPolicy | None = None,
        heartbeat_timeout: float = 60.0,
    ) -> None:
        """``factory`` is ``module:function``: EngineConfig -> (Executable, ModelFacts), called in the child."""
        self._config = config
        self._factory = factory
        self._restarts = restarts or RestartPolicy()
        self._heartbeat_timeout = heartbeat_timeout
        self._child: EngineProcess | None = None
        self._ready: Ready | None = None
        self._health: Health = "starting"
        self._open: set[str] = set()
        self._deaths: list[float] = []  # times, within the window
        self.num_restarts = 0
        self.stats = Stats()  # the latest

    def start(self, timeout: float | None = None) -> Ready:
        """Start the process and block until it is ready. Raises ``EngineStartFailed``; then nothing is left running."""
        child = EngineProcess(self._config, self._factory)
        try:
            self._ready = child.wait_ready(timeout)
        except BaseException:
            child.close()
            self._health = "dead"
            raise
        self._child = child
        self._health = "ready"
        return self._ready

    @property
    def ready(self) -> Ready:
        """What the engine said of itself when it came up (last)."""
        assert self._ready is not None, "start() comes first"
        return self._ready

    @property
    def health(self) -> Health:
        """``ready`` only if the process lives at this moment."""
        if self._health == "ready" and (self._child is None or self._child.ending() is not None):
            return "restarting"
        return self._health

    @property
    def pid(self) -> int | None:
        """The present process's id; None between two lives."""
        return None if self._child is None else self._child.pid

    def submit(self, request: Request) -> None:
        """Send a request. Raises ``InvalidParameter`` or ``QueueFull``, and ``EngineDead`` between two lives."""
        if self._child is None or self.health != "ready":
            raise EngineDead(
                "The engine is down for good; restart the server."
                if self._health == "dead"
                else "The engine died and is being restarted; try again in some seconds."
            )
        if request.request_id in self._open:
            raise ValueError(f"request id {request.request_id!r} is open already")
        Limits.of(self.ready).check(request, len(self._open))
        self._open.add(request.request_id)
        self._child.send(request)

    def abort(self, request_ids: Items[str]) -> None:
        """Ask for requests to be ended. Ids that are not open are ignored."""
        ids = [request_id for request_id in request_ids if request_id in self._open]
        if ids and self._child is not None:
            self._child.send(Abort(ids))

    async def stream(self) -> AsyncIterator[Batch | Stats]:
        """Batches and heartbeats, over the engine's deaths. Raises ``EngineDead`` when it stays dead."""
        while self._health != "dead":
            if self._child is None:
                await self._revive()
                continue
            message = await self._child.receive(0.2)
            if message is None:
                reason = self._child.ending()
                silence = time.monotonic() - self._child.last_heard
                if reason is None and silence > self._heartbeat_timeout:
                    reason = f"no sign of life for {silence:.0f} s"
                if reason is not None:
                    yield self._bury(reason)
            elif isinstance(message, Batch):
                self.stats = message.stats
                self._open -= {d.request_id for d in message.deltas if d.finish_reason is not None}
                yield message
            elif isinstance(message, Stats):
                self.stats = message
                yield message

    def _bury(self, reason: str) -> Batch:
        """Clear away a dead process. Returns the last deltas of all open requests."""
        assert self._child is not None
        log.error("The engine process ended: %s. %d requests were open.", reason, len(self._open))
        self._child.close()
        self._child = None
        self._health = "restarting"
        self._note_death()
        error = (
            f"The engine ended while this request was open ({reason}). It is being restarted; send it again."
        )
        deltas = [
            Delta(request_id=request_id, token_ids=[], finish_reason="error", error=error)
            for request_id in sorted(self._open)
        ]
        self._open.clear()
        self.stats = Stats()
        return Batch(deltas=deltas, stats=self.stats)

    def _note_death(self) -> None:
        now = time.monotonic()
        self._deaths = [t for t in self._deaths if t > now - self._restarts.window] + [now]

    async def _revive(self) -> None:
        """Start a new process, after the policy's delay. Raises ``EngineDead`` if there were too many."""
        delay = self._restarts.delay(len(self._deaths))
        if delay is None:
            self._health = "dead"
            raise EngineDead(
                f"The engine ended {len(self._deaths)} times within {self._restarts.window:.0f} s and is not "
                "restarted again. Its log says why; then restart the server."
            )
        await asyncio.sleep(delay)
        child = EngineProcess(self._config, self._factory)
        try:
            self._ready = await child.wait_ready_async()
        except CompilerLLMError as error:
            child.close()
            self._note_death()
            log.error("The engine could not be restarted: %s", error)
        except BaseException:
            child.close()
            raise
        else:
            self._child = child
            self._health = "ready"
            self.num_restarts += 1
            log.warning("The engine is back, as process %d.", child.pid)

    def close(self) -> None:
        """End the process. Open requests get no more deltas. Idempotent."""
        self._health = "dead"
        if self._child is not None:
            self._child.close()
            self._child = None
