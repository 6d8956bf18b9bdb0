"""/v1/responses: turns of a conversation that the server can keep, go on with, and make in the background."""

import re
from collections.abc import AsyncIterator
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from starlette.responses import Response, StreamingResponse

from compilerllm.errors import InvalidParameter
from compilerllm.server.chat import ChatReader
from compilerllm.server.errors import UnknownField
from compilerllm.server.generation import Generation, Plan
from compilerllm.server.logprobs import TokenNames
from compilerllm.server.routes.responses.background import BackgroundRun
from compilerllm.server.routes.responses.items import Message
from compilerllm.server.routes.responses.request import (
    Asked,
    ResponsesRequest,
    check_include,
    plan_response,
    read_responses,
)
from compilerllm.server.routes.responses.shape import ResponseShape
from compilerllm.server.service import Service, body_schema, json_response
from compilerllm.server.sse import Dialect
from compilerllm.server.stored import Finished, Run, StoredResponses

_DIALECT = Dialect(end=b"")  # the last event tells that it is the last
_QUERY = frozenset({"stream", "starting_after", "include", "include[]", "include_obfuscation"})


def add_routes(app: FastAPI, service: Service) -> None:
    store = StoredResponses(service.config.responses_store_bytes)
    app.state.stored_responses = store

    def read(body: bytes) -> tuple[Asked, Plan]:
        request = read_responses(body)
        if request.background and not store.limit:
            raise InvalidParameter(
                "background needs a server that stores responses (--responses-store-bytes)", "background"
            )
        return plan_response(service, request, _history(store, request))

    def shape(asked: Asked, generation: Generation) -> ResponseShape:
        reader = ChatReader(generation, asked.ask.parser) if asked.ask.parser is not None else generation
        return ResponseShape(asked, service.model, generation, reader, TokenNames(service.tokenizer), store)

    async def create(request: Request) -> Response:
        """Make a response to the input."""

        async def answer() -> Response:
            asked, generation = await service.begin(request, read)
            shaped, wanted = shape(asked, generation), asked.request
            if not wanted.background:
                return await service.send(request, generation, shaped, wanted.stream, _DIALECT)
            try:
                body = shaped.body()
                run = BackgroundRun(shaped, generation, store, service.gate, keep_events=wanted.stream)
            except BaseException:
                generation.close()
                raise
            return _events(run.follow(0)) if wanted.stream else json_response(body)

        return await service.respond(answer, _DIALECT)

    async def retrieve(response_id: str, request: Request) -> Response:
        """A stored response, or the events of a background one from ``starting_after`` on."""
        streamed, start = _read_query(request)
        found = store.find(response_id)
        if streamed:
            if found.events is None:
                raise InvalidParameter(
                    "stream: only a response that was made with background and stream can be streamed again",
                    "stream",
                )
            return _events(_again(found, start))
        if isinstance(found, Finished):
            return Response(found.body, media_type="application/json")
        return json_response(found.body())

    async def cancel(response_id: str) -> Response:
        """End a background response that still runs; one that has ended stays as it is."""
        found = store.find(response_id)
        if isinstance(found, BackgroundRun):
            found.cancel()
            await found.wait()
            return json_response(found.body())
        assert isinstance(found, Finished)
        if not found.background:
            raise InvalidParameter("Only a response made with background can be cancelled", "response_id")
        return Response(found.body, media_type="application/json")

    async def delete(response_id: str) -> Response:
        """Forget a stored response."""
        store.remove(response_id)
        return json_response({"id": response_id, "object": "response.deleted", "deleted": True})

    path = "/v1/responses/{response_id}"
    app.add_api_route("/v1/responses", create, methods=["POST"], openapi_extra=body_schema(ResponsesRequest))
    app.add_api_route(path, retrieve, methods=["GET"])
    app.add_api_route(path, delete, methods=["DELETE"])
    app.add_api_route(path + "/cancel", cancel, methods=["POST"])


def _history(store: StoredResponses, request: ResponsesRequest) -> list[Message]:
    """The conversation that a request goes on with."""
    previous = request.previous_response_id
    if previous is None:
        return []
    found = store.find(previous, "previous_response_id")
    if not isinstance(found, Finished) or not found.history:
        raise InvalidParameter(
            f"The response {previous:.100} has not ended, or failed: there is nothing to go on with",
            "previous_response_id",
        )
    history: list[Message] = msgspec.json.decode(found.history)
    return history


def _read_query(request: Request) -> tuple[bool, int]:
    """Whether events are wanted, and the number of the first."""
    query: Any = request.query_params
    for name in query:
        if name not in _QUERY:
            raise UnknownField(f"Unknown query parameter {name!r:.100}", name[:100])
    check_include([*query.getlist("include"), *query.getlist("include[]")])
    streamed, after = query.get("stream", "false"), query.get("starting_after", "-1")
    if streamed not in ("true", "false"):
        raise InvalidParameter("stream must be true or false", "stream")
    if not re.fullmatch(r"-1|[0-9]{1,9}", after):
        raise InvalidParameter("starting_after must be a whole number", "starting_after")
    return streamed == "true", int(after) + 1


async def _again(found: Finished | Run, start: int) -> AsyncIterator[bytes]:
    if isinstance(found, BackgroundRun):
        async for events in found.follow(start):
            yield events
    elif found.events and found.events[start:]:
        yield b"".join(found.events[start:])


def _events(events: AsyncIterator[bytes]) -> Response:
    return StreamingResponse(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
