"""A response and its events, made of one generation: what is streamed adds up to what is given whole."""

import time
import uuid
from collections.abc import AsyncIterator, Iterator
from typing import Any

import msgspec

from compilerllm.server.blocks import Block, Blocks, Scored, Step
from compilerllm.server.chat import Reader
from compilerllm.server.errors import error_body, log_unforeseen
from compilerllm.server.generation import Generation
from compilerllm.server.logprobs import TokenNames, chat_logprobs
from compilerllm.server.routes.responses.items import answer_message
from compilerllm.server.routes.responses.request import Asked
from compilerllm.server.sse import named_event
from compilerllm.server.stored import Finished, StoredResponses
from compilerllm.text.output import TextDelta

Event = dict[str, Any]
_PREFIX = {"reasoning": "rs_", "text": "msg_", "call": "fc_"}
_ENDED = {"completed": "response.completed", "incomplete": "response.incomplete", "failed": "response.failed"}


class ResponseShape:
    """``stream`` and ``whole`` are the two ways for a client that waits; ``events`` for one that does not."""

    def __init__(
        self,
        asked: Asked,
        model: str,
        generation: Generation,
        reader: Reader,
        names: TokenNames,
        store: StoredResponses,
    ) -> None:
        request = asked.request
        self._asked, self._request = asked, request
        self._generation, self._reader, self._names, self._store = generation, reader, names, store
        self.id = "resp_" + generation.id
        self.status = "queued" if request.background else "in_progress"
        self._model, self._created = model, int(time.time())
        self._ended: int | None = None
        self._error: dict[str, Any] | None = None
        self._blocks = Blocks()
        self._ids: list[str] = []  # of the output's items
        self._shown: dict[int, int] = {}  # block -> its place in the output: thoughts may be left out
        self._number = 0
        self._raises = False

    # -- the three ways -------------------------------------------------------------------------------------------

    async def stream(self) -> AsyncIterator[bytes]:
        async for events in self.events():
            yield b"".join(map(named_event, events))

    async def whole(self) -> bytes:
        self._raises = True  # what fails has a status of its own
        async for _ in self.events():
            pass
        if self.status == "cancelled":
            return b""  # the client hung up
        return msgspec.json.encode(self.body())

    async def events(self) -> AsyncIterator[list[Event]]:
        """Numbered events for each turn of the engine. At the end the response is stored, where that is wanted."""
        opening = [self._event("response.created", response=self.body())]
        if self.status == "queued":
            opening.append(self._event("response.queued", response=self.body()))
            self.status = "in_progress"
        yield [*opening, self._event("response.in_progress", response=self.body())]
        try:
            while added := await self._reader.read():
                if events := [event for _, new in added for event in self._add(new)]:
                    yield events
        except Exception as error:  # told in the response, and logged if it is none of ours
            if self._raises:
                raise
            log_unforeseen(error)
            told = error_body(error)["error"]
            self._error = {"code": "server_error", "message": told["message"]}
            if told["param"]:
                self._error |= {"code": "invalid_prompt", "param": told["param"]}
            self._end("failed")
        else:
            if self._blocks.finish_reason is None:  # closed: the client hung up, or it was cancelled
                self._end("cancelled")
                return
            self._end("incomplete" if self._blocks.finish_reason == "length" else "completed")
        if self._request.store and not self._request.background:
            self._store.put(self.id, self.finished())
        yield [self._event(_ENDED[self.status], response=self.body())]

    def _end(self, status: str) -> None:
        self.status, self._ended = status, int(time.time())

    # -- what is told ---------------------------------------------------------------------------------------------

    def finished(self, events: list[bytes] | None = None) -> Finished:
        """What is kept of it."""
        messages = [*self._asked.conversation, answer_message(self._blocks.blocks)]
        useful = self.status in ("completed", "incomplete")
        history = msgspec.json.encode(messages) if useful else b""
        return Finished(msgspec.json.encode(self.body()), history, self._request.background, events)

    def body(self) -> dict[str, Any]:
        """The response as it is now."""
        request, params = self._request, self._generation.plan.params[0]
        reason = {"reason": "max_output_tokens"} if self.status == "incomplete" else None
        reasoning, text = request.reasoning, request.text
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._created,
            "completed_at": self._ended if self.status == "completed" else None,
            "status": self.status,
            "background": request.background,
            "error": self._error,
            "incomplete_details": reason,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "max_tool_calls": request.max_tool_calls,
            "metadata": request.metadata,
            "model": self._model,
            "output": [self._item(self._blocks.blocks[block], place) for block, place in self._shown.items()],
            "parallel_tool_calls": request.parallel_tool_calls,
            "previous_response_id": request.previous_response_id,
            "reasoning": {"effort": reasoning.effort if reasoning else None, "summary": None},
            "service_tier": "default",
            "store": request.store,
            "temperature": params.temperature,
            "text": {"format": (text.format if text else None) or {"type": "text"}},
            "tool_choice": request.tool_choice if request.tool_choice is not None else "auto",
            "tools": [_shown_tool(tool) for tool in request.tools],
            "top_logprobs": request.top_logprobs,
            "top_p": params.top_p,
            "truncation": request.truncation,
            "usage": self._usage() if self._ended is not None else None,
            "user": request.user,
        }

    def _usage(self) -> dict[str, Any]:
        generation = self._generation
        return {
            "input_tokens": generation.prompt_tokens,
            "input_tokens_details": {"cached_tokens": generation.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": generation.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": self._blocks.thought_tokens},
            "total_tokens": generation.prompt_tokens + generation.completion_tokens,
        }

    def _item(self, block: Block, place: int) -> dict[str, Any]:
        """A block as an item of the output, as it is now."""
        last = block.index == len(self._blocks.blocks) - 1
        status = "completed"
        if last and self._ended is None and self._blocks.finish_reason is None:
            status = "in_progress"
        elif last and self._blocks.finish_reason in ("length", None):
            status = "incomplete"
        item: dict[str, Any] = {"id": self._ids[place], "type": "message", "status": status}
        if block.kind == "call":
            return item | {
                "type": "function_call", "call_id": block.call_id, "name": block.name, "arguments": block.text,
            }  # fmt: skip
        if block.kind == "reasoning":
            return item | {"type": "reasoning", "summary": [], "content": [self._part(block)]}
        return item | {"role": "assistant", "content": [self._part(block)]}

    def _part(self, block: Block) -> dict[str, Any]:
        if block.kind == "reasoning":
            return {"type": "reasoning_text", "text": block.text}
        return {
            "type": "output_text",
            "text": block.text,
            "annotations": [],
            "logprobs": self._scores(block.scored),
        }

    def _scores(self, scored: Scored) -> list[dict[str, Any]]:
        if not scored or not self._request.scored:
            return []
        delta = TextDelta("", [token for token, _ in scored], [at for _, at in scored], None)
        told = chat_logprobs(delta, self._names, self._request.top_logprobs)
        return told["content"] if told else []

    # -- events ---------------------------------------------------------------------------------------------------

    def _add(self, new: TextDelta) -> Iterator[Event]:
        for step in self._blocks.add(new):
            if step.block.kind == "reasoning" and not self._request.include_reasoning:
                continue
            if step.what == "start":
                self._shown[step.block.index] = len(self._ids)
                self._ids.append(_PREFIX[step.block.kind] + uuid.uuid4().hex)
            yield from self._tell(step, self._shown[step.block.index])

    def _tell(self, step: Step, place: int) -> Iterator[Event]:
        block, at = step.block, {"item_id": self._ids[place], "output_index": place}
        if block.kind == "call":
            name, content, more = "response.function_call_arguments", {}, {}
        else:
            name = "response.output_text" if block.kind == "text" else "response.reasoning_text"
            content = {"content_index": 0}
            more = {"logprobs": self._scores(step.scored)} if block.kind == "text" else {}
        if step.what == "start":
            empty = self._item(block, place)
            if content:
                empty["content"] = []
            yield self._event("response.output_item.added", output_index=place, item=empty)
            if content:
                yield self._event("response.content_part.added", **at, **content, part=self._part(block))
        elif step.what == "more":
            yield self._event(f"{name}.delta", **at, **content, delta=step.text, **more)
        else:
            if block.kind == "text":
                more = {"logprobs": self._scores(block.scored)}
            text = (
                {"arguments": block.text, "name": block.name}
                if block.kind == "call"
                else {"text": block.text}
            )
            yield self._event(f"{name}.done", **at, **content, **text, **more)
            if content:
                yield self._event("response.content_part.done", **at, **content, part=self._part(block))
            yield self._event(
                "response.output_item.done", output_index=place, item=self._ended_item(block, place)
            )

    def _ended_item(self, block: Block, place: int) -> dict[str, Any]:
        cut = self._blocks.finish_reason == "length"
        return self._item(block, place) | {"status": "incomplete" if cut else "completed"}

    def _event(self, kind: str, **told: Any) -> Event:
        number, self._number = self._number, self._number + 1
        return {"type": kind, "sequence_number": number, **told}


def _shown_tool(tool: dict[str, Any]) -> dict[str, Any]:
    """A tool as responses repeat it: with what it left out."""
    return {"description": None, "parameters": None, "strict": False, **tool}
