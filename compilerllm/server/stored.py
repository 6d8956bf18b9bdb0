"""Responses that are kept to be fetched and gone on with: a bounded store in memory, the least used dropped first."""

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, Protocol

from compilerllm.server.errors import ResponseNotFound


@dataclass(frozen=True)
class Finished:
    """A response that has ended, as bytes, so that what it takes is known.

    body: what a client gets. history: the conversation with its answer, as JSON; empty where it cannot be gone on with.
    events: those of a background stream, to be sent again.
    """

    body: bytes
    history: bytes
    background: bool
    events: list[bytes] | None = None

    @property
    def num_bytes(self) -> int:
        return len(self.body) + len(self.history) + sum(map(len, self.events or ())) + _OVERHEAD


_OVERHEAD = 1024  # of the objects that hold it


class Run(Protocol):
    """A response that is still being made, without a client that waits."""

    events: list[bytes] | None

    def body(self) -> dict[str, Any]: ...

    def cancel(self) -> None: ...


class StoredResponses:
    """``limit`` is in bytes; 0 keeps nothing. What still runs is not counted, and never dropped."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.num_bytes = 0
        self._finished: OrderedDict[str, Finished] = OrderedDict()
        self._running: dict[str, Run] = {}

    def __len__(self) -> int:
        return len(self._finished) + len(self._running)

    def put(self, response_id: str, response: Finished) -> None:
        """Keep a response that has ended; those longest unused make room. One that is too large alone is not kept."""
        if response.num_bytes > self.limit:
            return
        self._finished[response_id] = response
        self.num_bytes += response.num_bytes
        while self.num_bytes > self.limit:
            _, oldest = self._finished.popitem(last=False)
            self.num_bytes -= oldest.num_bytes

    def start(self, response_id: str, run: Run) -> None:
        self._running[response_id] = run

    def end(self, response_id: str, response: Finished) -> None:
        """Keep what a run made, unless it was removed meanwhile."""
        if self._running.pop(response_id, None) is not None:
            self.put(response_id, response)

    def find(self, response_id: str, param: str = "response_id") -> "Finished | Run":
        """Raises ``ResponseNotFound``; ``param`` is what the request calls it."""
        if response_id in self._running:
            return self._running[response_id]
        if response_id not in self._finished:
            raise ResponseNotFound(response_id, param)
        self._finished.move_to_end(response_id)
        return self._finished[response_id]

    def remove(self, response_id: str) -> None:
        """Forget a response; end it if it still runs. Raises ``ResponseNotFound``."""
        found = self.find(response_id)
        if isinstance(found, Finished):
            del self._finished[response_id]
            self.num_bytes -= found.num_bytes
        else:
            del self._running[response_id]
            found.cancel()
