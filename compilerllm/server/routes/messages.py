"""/v1/messages: Anthropic's API over the same turn of a chat."""

from collections.abc import AsyncIterator, Iterator
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from pydantic_core import from_json
from starlette.responses import Response

from compilerllm.server.blocks import Block, Blocks, Step
from compilerllm.server.chat import ChatAsk, ChatReader, Reader, plan_chat, told_apart
from compilerllm.server.errors import anthropic_body, error_body, error_response, find_refusal
from compilerllm.server.generation import Generation, Plan
from compilerllm.server.message_request import CountRequest, MessagesRequest, read_messages_request
from compilerllm.server.service import Service, body_schema, json_response, read_body
from compilerllm.server.sse import Dialect, named_event
from compilerllm.text.chat import render_chat
from compilerllm.text.prompts import encode_prompt

_STOPS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def _error_event(error: BaseException) -> bytes:
    told = anthropic_body(find_refusal(error).status, error_body(error)["error"]["message"])
    return named_event(told)


_DIALECT = Dialect(lambda error: error_response(error, "/v1/messages"), _error_event, b"")


class MessageShape:
    """A message, streamed and whole."""

    def __init__(self, request: MessagesRequest, model: str, generation: Generation, reader: Reader) -> None:
        self._generation, self._reader, self._blocks = generation, reader, Blocks()
        self._show_thoughts = not request.hides_thoughts
        self._shown: dict[int, int] = {}  # block -> its place in the content
        self._head = {"id": "msg_" + generation.id, "type": "message", "role": "assistant", "model": model}

    async def stream(self) -> AsyncIterator[bytes]:
        end: dict[str, Any] = {"stop_reason": None, "stop_sequence": None}
        begun: dict[str, Any] = {**self._head, "content": [], **end, "usage": self._usage()}
        yield named_event({"type": "message_start", "message": begun}) + named_event({"type": "ping"})
        while added := await self._reader.read():
            events = [
                event for _, new in added for step in self._blocks.add(new) for event in self._tell(step)
            ]
            if events:
                yield b"".join(map(named_event, events))
        if self._blocks.finish_reason is not None:
            last = {"type": "message_delta", "delta": self._end(), "usage": self._usage()}
            yield named_event(last) + named_event({"type": "message_stop"})

    async def whole(self) -> bytes:
        while added := await self._reader.read():
            for _, new in added:
                for step in self._blocks.add(new):
                    for _ in self._tell(step):
                        pass
        if self._blocks.finish_reason is None:
            return b""  # the client hung up
        content = [_whole_block(self._blocks.blocks[i]) for i in self._shown]
        return msgspec.json.encode({**self._head, "content": content, **self._end(), "usage": self._usage()})

    def _tell(self, step: Step) -> Iterator[dict[str, Any]]:
        block = step.block
        if block.kind == "reasoning" and not self._show_thoughts:
            return
        if step.what == "start":
            self._shown[block.index] = len(self._shown)
            at = {"index": self._shown[block.index]}
            yield {"type": "content_block_start", **at, "content_block": _empty_block(block)}
        elif step.what == "more":
            yield {
                "type": "content_block_delta",
                "index": self._shown[block.index],
                "delta": _delta(block, step.text),
            }
        else:
            yield {"type": "content_block_stop", "index": self._shown[block.index]}

    def _end(self) -> dict[str, Any]:
        """Why it ended."""
        reason, stop = self._blocks.finish_reason, self._blocks.stop_reason
        if reason == "stop" and isinstance(stop, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": stop}
        return {"stop_reason": _STOPS.get(reason or "", "end_turn"), "stop_sequence": None}

    def _usage(self) -> dict[str, Any]:
        """Tokens so far; those of the prompt that were cached stand apart from the others."""
        generation = self._generation
        return {
            "input_tokens": generation.prompt_tokens - generation.cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": generation.cached_tokens,
            "output_tokens": generation.completion_tokens,
            "output_tokens_details": {"thinking_tokens": self._blocks.thought_tokens},
        }


def _empty_block(block: Block) -> dict[str, Any]:
    if block.kind == "call":
        return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": {}}
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": "", "signature": ""}
    return {"type": "text", "text": ""}


def _delta(block: Block, text: str) -> dict[str, str]:
    if block.kind == "call":
        return {"type": "input_json_delta", "partial_json": text}
    if block.kind == "reasoning":
        return {"type": "thinking_delta", "thinking": text}
    return {"type": "text_delta", "text": text}


def _whole_block(block: Block) -> dict[str, Any]:
    empty = _empty_block(block)
    if block.kind == "call":
        return empty | {"input": _read_arguments(block.text)}
    return empty | {"thinking" if block.kind == "reasoning" else "text": block.text}


def _read_arguments(text: str) -> dict[str, Any]:
    """A call's arguments, as far as they came: the same as a client makes of the streamed pieces."""
    try:
        found = from_json(text.encode(), allow_partial=True) if text.strip() else {}
    except ValueError:
        found = text
    return (
        found if isinstance(found, dict) else {"arguments": found}
    )  # what is no object is shown all the same


def _ask(service: Service, request: MessagesRequest) -> ChatAsk:
    service.check_model(request.model)
    use = request.tool_use()
    params, parser = told_apart(service, use, request.sampling_params(service.sampling_defaults, use))
    return ChatAsk(
        request.chat_messages(),
        params,
        options=request.plan_options(),
        template=request.template(use),
        parser=parser,
    )


def add_routes(app: FastAPI, service: Service) -> None:
    def read(body: bytes) -> tuple[tuple[MessagesRequest, ChatAsk], Plan]:
        request = read_messages_request(body, MessagesRequest)
        ask = _ask(service, request)
        return (request, ask), plan_chat(service, ask)

    def shape(asked: tuple[MessagesRequest, ChatAsk], generation: Generation) -> MessageShape:
        request, ask = asked
        reader = ChatReader(generation, ask.parser) if ask.parser is not None else generation
        return MessageShape(request, service.model, generation, reader)

    def count(body: bytes) -> int:
        request = read_messages_request(body, CountRequest)
        ask = _ask(service, request)
        text = render_chat(service.tokenizer, service.model, ask.messages, ask.source, **ask.template)
        return len(
            encode_prompt(service.tokenizer, text, add_special_tokens=False, param="messages").token_ids
        )

    async def create_message(request: Request) -> Response:
        """Continue a conversation with an assistant's message."""
        return await service.generate(request, read, shape, lambda asked: asked[0].stream, _DIALECT)

    async def count_tokens(request: Request) -> Response:
        """Count the tokens of a conversation, without an answer."""

        async def answer() -> Response:
            body = await read_body(request, service.config.max_body_bytes)
            return json_response({"input_tokens": await service.in_thread(count, body)})

        return await service.respond(answer, _DIALECT)

    app.add_api_route(
        "/v1/messages", create_message, methods=["POST"], openapi_extra=body_schema(MessagesRequest)
    )
    app.add_api_route(
        "/v1/messages/count_tokens", count_tokens, methods=["POST"], openapi_extra=body_schema(CountRequest)
    )
