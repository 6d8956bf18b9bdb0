"""Bodies with choices, streamed and whole, as OpenAI's chat and text completions have them."""

import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from typing import Any

import msgspec

from compilerllm.server.chat import Message, Reader
from compilerllm.server.generation import Generation
from compilerllm.server.protocol import GenerationRequest
from compilerllm.server.sse import event
from compilerllm.text.output import TextDelta


class Choices(ABC):
    """Turns one request's deltas into bodies. ``stream`` and ``whole`` are the two ways; each may be used once."""

    id_prefix: str
    object_name: str
    chunk_name: str

    def __init__(
        self, request: GenerationRequest, model: str, generation: Generation, reader: Reader | None = None
    ) -> None:
        """``reader``: in place of the generation's own deltas."""
        self._generation, self._reader = generation, reader or generation
        self._always, self._at_end = request.usage_always, request.usage_at_end
        self._head = {"id": self.id_prefix + generation.id, "created": int(time.time()), "model": model}
        self._fast = [self._fast_ends(i) for i in range(generation.num_sequences)] if request.stream else []

    # what differs between chat and text

    @abstractmethod
    def logprobs_of(self, index: int, new: TextDelta) -> Any:
        """What this delta adds to the logprobs of a choice; None if they were not asked for."""

    @abstractmethod
    def chunk_choice(self, index: int, new: TextDelta, logprobs: Any) -> dict[str, Any]:
        """A streamed choice, without its finish."""

    @abstractmethod
    def whole_choice(self, index: int, message: Message, logprobs: list[Any]) -> dict[str, Any]:
        """A finished choice, without its finish; ``logprobs`` are those of its deltas."""

    def opening(self) -> list[dict[str, Any]]:
        """Choices of the first events, before any token."""
        return []

    def only_text(self, new: TextDelta) -> bool:
        """Whether an unfinished delta brings nothing but text."""
        return new.logprobs is None

    # streaming

    async def stream(self) -> AsyncIterator[bytes]:
        """Events for each turn of the engine, joined: one write to the socket however many tokens came."""
        opening = [self._chunk(choice) for choice in self.opening()]
        if opening:
            yield b"".join(opening)
        while added := await self._reader.read():
            events = [self._event(index, new) for index, new in added]
            if chunk := b"".join(events):
                yield chunk
        if self._at_end:
            yield event(
                {**self._head, "object": self.chunk_name, "choices": [], "usage": self._generation.usage()}
            )

    def _event(self, index: int, new: TextDelta) -> bytes:
        if new.finish_reason is None and not self._always and self.only_text(new):
            if not new.text:
                return b""  # held back
            before, after = self._fast[index]
            return before + msgspec.json.encode(new.text) + after
        choice = self.chunk_choice(index, new, self.logprobs_of(index, new))
        return self._chunk({**choice, **_finish(new)} if new.finish_reason is not None else choice)

    def _chunk(self, choice: dict[str, Any]) -> bytes:
        body = {**self._head, "object": self.chunk_name, "choices": [choice]}
        if self._always:
            body["usage"] = self._generation.usage()
        elif self._at_end:
            body["usage"] = None
        return event(body)

    def _fast_ends(self, index: int) -> tuple[bytes, bytes]:
        """The bytes before and after the text in an ordinary event: nearly all events differ in their text alone."""
        mark = "\0text\0"
        choice = self.chunk_choice(index, TextDelta(mark, [], None, None), None)
        before, after = self._chunk(choice).split(msgspec.json.encode(mark))
        return before, after

    # all at once

    async def whole(self) -> bytes:
        """The response body when nothing more comes. Empty bytes if the client hung up meanwhile."""
        count = self._generation.num_sequences
        messages = [Message() for _ in range(count)]
        logprobs: list[list[Any]] = [[] for _ in range(count)]
        finishes: list[dict[str, Any] | None] = [None] * count
        while added := await self._reader.read():
            for index, new in added:
                messages[index].add(new)
                part = self.logprobs_of(index, new)
                if part is not None:
                    logprobs[index].append(part)
                if new.finish_reason is not None:
                    finishes[index] = _finish(new)
        choices = []
        for index, finish in enumerate(finishes):
            if finish is None:
                return b""
            choices.append({**self.whole_choice(index, messages[index], logprobs[index]), **finish})
        body = {
            **self._head,
            "object": self.object_name,
            "choices": choices,
            "usage": self._generation.usage(),
        }
        return msgspec.json.encode(body)


def _finish(new: TextDelta) -> dict[str, Any]:
    return {"finish_reason": new.finish_reason, "stop_reason": new.stop_reason}
