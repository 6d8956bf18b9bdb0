"""Bodies with choices, streamed and whole, as OpenAI's chat and text completions have them."""

import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from typing import Any

import msgspec

from compilerllm.server.chat import Message, Reader, join_deltas
from compilerllm.server.generation import Generation
from compilerllm.server.logprobs import TokenNames, prompt_logprobs
from compilerllm.server.protocol import GenerationRequest
from compilerllm.server.sse import event
from compilerllm.text.output import TextDelta


class Choices(ABC):
    """Turns one request's deltas into bodies. ``stream`` and ``whole`` are the two ways; each may be used once."""

    id_prefix: str
    object_name: str
    chunk_name: str

    def __init__(
        self,
        request: GenerationRequest,
        model: str,
        generation: Generation,
        names: TokenNames,
        reader: Reader | None = None,
    ) -> None:
        """``reader``: in place of the generation's own deltas."""
        self._generation, self._reader, self._names = generation, reader or generation, names
        self._always, self._at_end = request.usage_always, request.usage_at_end
        self._token_ids, self._scores = request.return_token_ids, request.prompt_logprobs is not None
        self._interval = request.stream_interval
        self._held: dict[int, TextDelta] = {}  # by choice: what waits for the interval to be full
        self._pending: dict[int, Any] = {}  # by choice: log-probabilities of an echoed prompt
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

    def only_text(self, index: int, new: TextDelta) -> bool:
        """Whether an unfinished delta brings nothing but text."""
        return new.logprobs is None and not self._token_ids

    def read_delta(self, index: int, new: TextDelta) -> TextDelta:
        """What a delta adds to the choice, which may be more than the model wrote."""
        return new

    def of_prompt(self, index: int) -> dict[str, Any]:
        """What is told of a choice's prompt: token ids and log-probabilities, where asked for."""
        prompt, told = self._generation.prompt_of(index), dict[str, Any]()
        if self._token_ids:
            told["prompt_token_ids"] = prompt.token_ids
        if self._scores:
            scores = self._generation.prompt_scores.get(index, [])
            told["prompt_logprobs"] = prompt_logprobs(prompt.token_ids, scores, self._names)
        return told

    def shown(self, choices: list[dict[str, Any]], likelihoods: list[float]) -> list[dict[str, Any]]:
        """The choices that are shown, of all that were made; ``likelihoods``: mean log-probability of their tokens."""
        return choices

    def top_level(self) -> dict[str, Any]:
        """What a whole body says beside its choices."""
        return {}

    # streaming

    async def stream(self) -> AsyncIterator[bytes]:
        """Events for each turn of the engine, joined: one write to the socket however many tokens came."""
        opening = [self._chunk(choice) for choice in self.opening()]
        if opening:
            yield b"".join(opening)
        while added := await self._reader.read():
            if self._interval > 1:
                added = self._gather(added)
            events = [self._event(index, self.read_delta(index, new)) for index, new in added]
            if chunk := b"".join(events):
                yield chunk
        if self._at_end:
            yield event(
                {**self._head, "object": self.chunk_name, "choices": [], "usage": self._generation.usage()}
            )

    def _gather(self, added: Sequence[tuple[int, TextDelta]]) -> list[tuple[int, TextDelta]]:
        """Deltas joined until they are ``stream_interval`` tokens; what is less waits for the next turn."""
        full = []
        for index, new in added:
            held = self._held.pop(index, None)
            if held is not None:
                new = join_deltas(held, new)
            if new.finish_reason is None and len(new.token_ids) < self._interval:
                self._held[index] = new
            else:
                full.append((index, new))
        return full

    def _event(self, index: int, new: TextDelta) -> bytes:
        if new.finish_reason is None and not self._always and self.only_text(index, new):
            if not new.text:
                return b""  # held back
            before, after = self._fast[index]
            return before + msgspec.json.encode(new.text) + after
        choice = self.chunk_choice(index, new, self.logprobs_of(index, new))
        if self._token_ids:
            choice["token_ids"] = new.token_ids
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
        token_ids: list[list[int]] = [[] for _ in range(count)]
        sums = [0.0] * count
        finishes: list[dict[str, Any] | None] = [None] * count
        while added := await self._reader.read():
            for index, delta in added:
                new = self.read_delta(index, delta)
                messages[index].add(new)
                token_ids[index] += new.token_ids
                sums[index] += sum(at.chosen for at in new.logprobs or ())
                part = self.logprobs_of(index, new)
                if part is not None:
                    logprobs[index].append(part)
                if new.finish_reason is not None:
                    finishes[index] = _finish(new)
        choices = []
        for index, finish in enumerate(finishes):
            if finish is None:
                return b""
            choice = {**self.whole_choice(index, messages[index], logprobs[index]), **finish}
            if self._token_ids:
                choice["token_ids"] = token_ids[index]
            choices.append(choice)
        means = [total / max(1, len(ids)) for total, ids in zip(sums, token_ids, strict=True)]
        body = {
            **self._head,
            **self.top_level(),
            "object": self.object_name,
            "choices": self.shown(choices, means),
            "usage": self._generation.usage(),
        }
        return msgspec.json.encode(body)


def _finish(new: TextDelta) -> dict[str, Any]:
    return {"finish_reason": new.finish_reason, "stop_reason": new.stop_reason}
