"""One reader of the engine's stream, which hands each delta to the API request it belongs to."""

import asyncio
import logging
from collections.abc import Callable

from starlette.types import Receive

from compilerllm.errors import EngineDead, QueueFull
from compilerllm.runtime.client import EngineClient
from compilerllm.runtime.messages import Batch, Delta, Request, Stats
from compilerllm.server.errors import ClientTooSlow

log = logging.getLogger("compilerllm.server")


class Feed:
    """Deltas of the engine requests of one API request. One task reads it.

    Deltas wait here while the reader is slow, so that a slow client slows nobody else; ``limit`` of them at most.
    """

    def __init__(self, streams: "EngineStreams", request_ids: list[str], limit: int) -> None:
        self._streams = streams
        self._limit = limit
        self._overflowed = False
        self.open_ids = set(request_ids)
        self._waiting: list[Delta] = []
        self._reader: asyncio.Future[None] | None = None
        self._closed = False

    def push(self, delta: Delta) -> None:
        if delta.finish_reason is not None:
            self.open_ids.discard(delta.request_id)
        self._waiting.append(delta)
        if len(self._waiting) > self._limit:
            self._overflowed = True
            self.close()
        self._wake()

    async def read(self) -> list[Delta]:
        """All deltas since the last call, in order; an empty list once the feed is closed or has ended.

        Raises ``ClientTooSlow`` once more of them waited than may.
        """
        if not self._waiting and self.open_ids and not self._closed:
            self._reader = asyncio.get_running_loop().create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        deltas, self._waiting = self._waiting, []
        if self._overflowed:
            self._overflowed = False
            raise ClientTooSlow(self._limit)
        return [] if self._closed else deltas

    def abort(self, request_id: str) -> None:
        """End one engine request early; its blocks are freed, later deltas of it are dropped."""
        if request_id in self.open_ids:
            self.open_ids.discard(request_id)
            self._streams.abort([request_id])

    def close(self) -> None:
        """Abort what still runs. The reader, if it waits, gets an empty list."""
        self._closed = True
        self._waiting.clear()
        if self.open_ids:
            self._streams.abort(list(self.open_ids))
            self.open_ids.clear()
        self._wake()

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)


class EngineStreams:
    """The engine, shared by all API requests of this process."""

    def __init__(self, client: EngineClient, max_unread: int = 1 << 14) -> None:
        self.client = client
        self._max_unread = max_unread  # deltas of each sequence that wait for a reader
        self.num_refused = 0  # requests that the queue had no room for
        self.stats = Stats()
        self.on_stats: Callable[[Stats], None] = lambda _: None  # called with each batch's
        self._feeds: dict[str, Feed] = {}
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="engine-stream")

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._fail_all("the server is shutting down")

    @property
    def alive(self) -> bool:
        """Whether requests can be served now."""
        return self._task is not None and not self._task.done() and self.client.health == "ready"

    @property
    def num_open(self) -> int:
        return len(self._feeds)

    def submit(self, requests: list[Request]) -> Feed:
        """Hand requests to the engine. Raises ``EngineDead`` or ``QueueFull``; then none of them runs."""
        if not self.alive:
            raise EngineDead("The engine is not running; it may be restarting. Try again in a few seconds.")
        feed = Feed(self, [r.request_id for r in requests], self._max_unread * len(requests))
        for request in requests:
            self._feeds[request.request_id] = feed
        try:
            for request in requests:
                self.client.submit(request)
        except QueueFull:
            self.num_refused += 1
            feed.close()
            raise
        except BaseException:
            feed.close()
            raise
        return feed

    def abort(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            self._feeds.pop(request_id, None)
        self.client.abort(request_ids)

    async def _run(self) -> None:
        try:
            async for message in self.client.stream():
                if isinstance(message, Batch):
                    self._deliver(message)
                else:
                    self.stats = message
        except EngineDead as error:
            log.error("%s", error)
            self._fail_all(str(error))
        except Exception as error:
            log.exception("the engine's stream broke")
            self._fail_all(f"the engine failed: {error}")
        else:
            self._fail_all("the engine has ended")

    def _deliver(self, batch: Batch) -> None:
        feeds = self._feeds
        for delta in batch.deltas:
            feed = feeds.get(delta.request_id)
            if feed is None:
                continue  # aborted meanwhile
            if delta.finish_reason is not None:
                del feeds[delta.request_id]
            feed.push(delta)
        self.stats = batch.stats
        self.on_stats(batch.stats)

    def _fail_all(self, message: str) -> None:
        failed, self._feeds = self._feeds, {}
        for request_id, feed in failed.items():
            feed.push(Delta(request_id=request_id, token_ids=[], finish_reason="error", error=message))


async def watch_disconnect(receive: Receive, feed: Feed) -> None:
    """Close the feed when the client hangs up. ``receive`` is the ASGI callable, its body already read."""
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            feed.close()
            return
