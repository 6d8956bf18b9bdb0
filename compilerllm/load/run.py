"""Requests at given times, each streamed and timed event by event."""

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from compilerllm.errors import CompilerLLMError
from compilerllm.load.datasets import Ask
from compilerllm.remote.server import RemoteServer

T = TypeVar("T")


@dataclass(frozen=True)
class Target:
    """Where requests go. fields: that every body has; timeout: seconds after which a request has failed."""

    server: RemoteServer
    endpoint: str
    model: str
    fields: dict[str, Any]
    timeout: float

    def body(self, ask: Ask) -> dict[str, Any]:
        if self.endpoint.endswith("chat/completions"):
            said: dict[str, Any] = {"messages": [{"role": "user", "content": ask.prompt}]}
        else:
            said = {"prompt": ask.prompt}
        usage = {"include_usage": True}
        return {
            "model": self.model,
            **said,
            "max_tokens": ask.max_tokens,
            "stream_options": usage,
            **self.fields,
        }


@dataclass
class Timing:
    """One request. Seconds from when it was sent; ``start``, when that was, from the run's start."""

    start: float
    first: float = 0.0  # to the first event with text
    end: float = 0.0
    gaps: list[float] = field(default_factory=list)  # between two such events
    prompt_tokens: int = 0
    output_tokens: int = 0
    error: str | None = None

    @property
    def per_token(self) -> float | None:
        """Mean seconds per token after the first; None of a single token."""
        return (self.end - self.first) / (self.output_tokens - 1) if self.output_tokens > 1 else None


def run_quickly(work: Coroutine[Any, Any, T]) -> T:
    """As ``asyncio.run``, on uvloop where there is one: a load generator must not be what is measured."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(work)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work)


async def run_load(
    target: Target,
    asks: Sequence[Ask],
    times: Sequence[float],
    most: int | None,
    on_end: Callable[[], None] = lambda: None,
) -> tuple[float, list[Timing]]:
    """Send ask i at second times[i], or, with ``most`` requests open, as soon as one of them ends.

    Returns the seconds that all took, and what each saw. A request that fails has an ``error``; none ends the run.
    """
    gate = asyncio.Semaphore(most or len(asks) or 1)
    begin = time.perf_counter()

    async def one(ask: Ask) -> Timing:
        async with gate:
            timing = Timing(time.perf_counter() - begin)
            try:
                async with asyncio.timeout(target.timeout):
                    await _stream(target, ask, timing, begin)
            except TimeoutError:
                timing.error = f"no end within {target.timeout:g} s"
            except CompilerLLMError as error:
                timing.error = str(error)
            on_end()
            return timing

    tasks = []
    async with asyncio.TaskGroup() as group:
        for ask, due in zip(asks, times, strict=True):
            if (wait := begin + due - time.perf_counter()) > 0:
                await asyncio.sleep(wait)
            tasks.append(group.create_task(one(ask)))
    return time.perf_counter() - begin, [t.result() for t in tasks]


async def _stream(target: Target, ask: Ask, timing: Timing, begin: float) -> None:
    last = 0.0
    events = 0
    start = begin + timing.start
    async for event in target.server.stream(target.endpoint, target.body(ask)):
        now = time.perf_counter()
        if any(_has_text(choice) for choice in event.get("choices") or ()):
            events += 1
            if not last:
                timing.first = now - start
            else:
                timing.gaps.append(now - last)
            last = now
        if usage := event.get("usage"):
            timing.prompt_tokens = usage.get("prompt_tokens") or 0
            timing.output_tokens = usage.get("completion_tokens") or 0
    if not last:
        timing.error = "the stream had no text"
        return
    timing.end = last - start
    timing.output_tokens = timing.output_tokens or events  # a server that tells no usage: an event is a token


def _has_text(choice: dict[str, Any]) -> bool:
    delta = choice.get("delta") or choice
    return bool(
        delta.get("text")
        or delta.get("content")
        or delta.get("reasoning")
        or delta.get("reasoning_content")
        or delta.get("tool_calls")
    )
