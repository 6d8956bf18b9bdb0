"""/v1/chat/completions/batch: several conversations at once, one body with a choice for each."""

from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import Response

from compilerllm.errors import InvalidParameter
from compilerllm.server.chat import ChatAsk, ChatReader, Message, plan_texts
from compilerllm.server.generation import Generation, Plan
from compilerllm.server.protocol import read_request
from compilerllm.server.routes.chat import ChatRequest, ChatShape, ask_chat
from compilerllm.server.service import Service, body_schema
from compilerllm.text.chat import render_chat


class BatchChatRequest(ChatRequest, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /v1/chat/completions/batch: that of chat completions, ``messages`` a list of conversations."""

    messages: list[list[Any]]

    def check(self) -> None:
        """Raises ``InvalidParameter`` for what one body of many choices cannot do."""
        if not self.messages:
            raise InvalidParameter("messages is an empty list: give at least one conversation", "messages")
        for name, fine in (("stream", not self.stream), ("echo", not self.echo), ("n", self.n == 1)):
            if not fine:
                raise InvalidParameter(f"{name} cannot go with a batch: leave it out", name)


class BatchShape(ChatShape):
    """A choice for each conversation, in their order."""

    def top_level(self) -> dict[str, Any]:
        return {}

    def whole_choice(self, index: int, message: Message, logprobs: list[Any]) -> dict[str, Any]:
        return super().whole_choice(index, message, logprobs) | self.of_prompt(index)


def add_routes(app: FastAPI, service: Service) -> None:
    def read(body: bytes) -> tuple[tuple[BatchChatRequest, ChatAsk], Plan]:
        request = read_request(body, BatchChatRequest)
        request.check()
        ask = ask_chat(service, request)
        texts = [_render(service, ask, messages, i) for i, messages in enumerate(request.messages)]
        return (request, ask), plan_texts(service, ask, texts)

    def shape(asked: tuple[BatchChatRequest, ChatAsk], generation: Generation) -> BatchShape:
        request, ask = asked
        reader = ChatReader(generation, ask.parser) if ask.parser is not None else None
        return BatchShape(request, service.model, service.tokenizer, generation, reader)

    async def complete_chats(request: Request) -> Response:
        """Continue several chats, each with an assistant's message."""
        return await service.generate(request, read, shape, lambda _: False)

    app.add_api_route(
        "/v1/chat/completions/batch",
        complete_chats,
        methods=["POST"],
        openapi_extra=body_schema(BatchChatRequest),
    )


def _render(service: Service, ask: ChatAsk, messages: list[Any], i: int) -> str:
    try:
        return render_chat(service.tokenizer, service.model, messages, ask.source, **ask.template)
    except InvalidParameter as error:  # which names the place within the conversation
        place = f"messages[{i}]"
        param = error.param.replace("messages", place, 1) if error.param else place
        raise InvalidParameter(str(error).replace("messages", place, 1), param) from error
