"""Responses made without a client that waits: run, cancelled, and followed by whoever asks."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from compilerllm.server.generation import Generation
from compilerllm.server.limits import Gate
from compilerllm.server.routes.responses.shape import ResponseShape
from compilerllm.server.sse import named_event
from compilerllm.server.stored import StoredResponses


class BackgroundRun:
    """One of them. It counts as an open request until it ends."""

    def __init__(
        self,
        shape: ResponseShape,
        generation: Generation,
        store: StoredResponses,
        gate: Gate,
        keep_events: bool,
    ) -> None:
        """Raises what ``Gate.enter`` does. ``keep_events``: for clients that follow it."""
        gate.enter()
        self._shape, self._generation, self._store, self._gate = shape, generation, store, gate
        self.events: list[bytes] | None = [] if keep_events else None
        self._more = asyncio.Event()
        self._ended = False
        store.start(shape.id, self)
        self._task = asyncio.create_task(
            self._run(), name="background-response"
        )  # held here: tasks are weakly held

    def body(self) -> dict[str, Any]:
        return self._shape.body()

    def cancel(self) -> None:
        self._generation.close()

    async def wait(self) -> None:
        """Until it has ended."""
        await asyncio.wait([self._task])

    async def _run(self) -> None:
        try:
            async for events in self._shape.events():
                if self.events is not None:
                    self.events += map(named_event, events)
                self._wake()
        finally:
            self._generation.close()
            self._gate.leave()
            self._ended = True
            self._store.end(self._shape.id, self._shape.finished(self.events))
            self._wake()

    def _wake(self) -> None:
        woken, self._more = self._more, asyncio.Event()
        woken.set()

    async def follow(self, start: int) -> AsyncIterator[bytes]:
        """The events from number ``start`` on, those that were and those that come."""
        events = self.events or []
        while True:
            if start < len(events):
                yield b"".join(events[start:])
                start = len(events)
            if self._ended:
                return
            await self._more.wait()
