"""/v1/chat/completions: an assistant's next message."""

from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import Response

from compilerllm.errors import InvalidParameter
from compilerllm.sampling_params import SamplingParams
from compilerllm.server.chat import CallDelta, ChatAsk, ChatDelta, ChatReader, Message, plan_chat, told_apart
from compilerllm.server.formats import one_form
from compilerllm.server.generation import Generation, Plan
from compilerllm.server.logprobs import TokenNames, chat_logprobs
from compilerllm.server.protocol import GenerationRequest, check_top_logprobs, read_request, sampling_params
from compilerllm.server.service import Service, body_schema
from compilerllm.server.shapes import Choices
from compilerllm.server.tools import ToolUse, read_tools
from compilerllm.text.output import TextDelta
from compilerllm.text.tokenizer import Tokenizer


class ChatRequest(GenerationRequest, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /v1/chat/completions."""

    messages: list[Any]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int = 0
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    echo: bool = False
    include_reasoning: bool = True
    reasoning_effort: str | None = None
    documents: list[dict[str, Any]] = []
    tools: list[Any] = []
    tool_choice: Any = None
    parallel_tool_calls: bool = True
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] = {}

    def sampling_params(self, defaults: dict[str, Any], use: ToolUse) -> SamplingParams:
        if self.top_logprobs and not self.logprobs:
            raise InvalidParameter("top_logprobs needs logprobs to be true", "top_logprobs")
        check_top_logprobs(self.top_logprobs)
        if self.prompt_logprobs is not None and self.stream:
            raise InvalidParameter(
                "prompt_logprobs cannot be streamed: set stream to false", "prompt_logprobs"
            )
        limit = self.max_tokens
        if self.max_completion_tokens is not None:
            limit = self.max_completion_tokens
            if limit < 1:
                message = f"max_completion_tokens must be at least 1, but is {limit}"
                raise InvalidParameter(message, "max_completion_tokens")
        form = one_form(self.form(), use.form())
        return sampling_params(self, limit, self.top_logprobs if self.logprobs else None, defaults, form)

    def tool_use(self) -> ToolUse:
        """The tools, and how they are to be used."""
        return read_tools(self.tools, self.tool_choice, self.parallel_tool_calls)

    def template(self, use: ToolUse) -> dict[str, Any]:
        """What the chat template is given beside the messages."""
        given: dict[str, Any] = {
            "add_generation_prompt": self.add_generation_prompt,
            "continue_final_message": self.continue_final_message,
            "documents": self.documents or None,
            "tools": use.for_template(),
        }
        if self.reasoning_effort is not None:
            given["reasoning_effort"] = self.reasoning_effort
        return given | self.chat_template_kwargs


class ChatShape(Choices):
    id_prefix = "chatcmpl-"
    object_name = "chat.completion"
    chunk_name = "chat.completion.chunk"

    def __init__(
        self,
        request: ChatRequest,
        model: str,
        tokenizer: Tokenizer,
        generation: Generation,
        reader: ChatReader | None,
    ) -> None:
        self._top, self._reasoning = request.top_logprobs, request.include_reasoning
        names = TokenNames(tokenizer, request.return_tokens_as_token_ids)
        self._echo = [_last_text(request.messages) if request.echo else ""] * generation.num_sequences
        super().__init__(request, model, generation, names, reader)

    def opening(self) -> list[dict[str, Any]]:
        delta = {"role": "assistant", "content": ""}
        indices = range(self._generation.num_sequences)
        return [{"index": i, "delta": delta, "logprobs": None, "finish_reason": None} for i in indices]

    def only_text(self, index: int, new: TextDelta) -> bool:
        more = isinstance(new, ChatDelta) and (new.reasoning or new.calls)
        return not more and super().only_text(index, new)

    def read_delta(self, index: int, new: TextDelta) -> TextDelta:
        if isinstance(new, ChatDelta) and not self._reasoning:
            new.reasoning = ""
        if self._echo[index]:
            new.text, self._echo[index] = self._echo[index] + new.text, ""
        return new

    def top_level(self) -> dict[str, Any]:
        return self.of_prompt(0)

    def logprobs_of(self, index: int, new: TextDelta) -> Any:
        return chat_logprobs(new, self._names, self._top)

    def chunk_choice(self, index: int, new: TextDelta, logprobs: Any) -> dict[str, Any]:
        delta: dict[str, Any] = {}
        if isinstance(new, ChatDelta):
            if new.reasoning:
                delta |= _reasoning(new.reasoning)
            if new.calls:
                delta["tool_calls"] = [{"index": c.index, **_call(c)} for c in new.calls]
        if new.text or (new.finish_reason is None and not delta):
            delta["content"] = new.text
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None}

    def whole_choice(self, index: int, message: Message, logprobs: list[Any]) -> dict[str, Any]:
        content = [token for part in logprobs for token in part["content"]]
        body: dict[str, Any] = {"role": "assistant", "content": message.text, "refusal": None}
        if message.reasoning:
            body |= _reasoning(message.reasoning)
        if message.calls:
            body |= {"content": message.text or None, "tool_calls": [_call(c) for c in message.calls]}
        return {
            "index": index,
            "message": body,
            "logprobs": {"content": content, "refusal": None} if logprobs else None,
        }


def _reasoning(text: str) -> dict[str, str]:
    """vLLM's name, and the older one that many clients read."""
    return {"reasoning": text, "reasoning_content": text}


def _call(call: CallDelta) -> dict[str, Any]:
    function = {"arguments": call.arguments}
    if call.name is None:
        return {"function": function}
    return {"id": call.call_id, "type": "function", "function": {"name": call.name, **function}}


def _last_text(messages: list[Any]) -> str:
    """The text that ``echo`` puts before the answer: the last message's."""
    last = messages[-1].get("content") if messages and isinstance(messages[-1], dict) else None
    return last if isinstance(last, str) else ""


def _own_template(service: Service, asked: ChatRequest) -> str | None:
    """The request's own chat template. Raises ``InvalidParameter`` where the server does not trust clients with one."""
    if asked.chat_template is not None and not service.config.trust_request_chat_template:
        raise InvalidParameter(
            "chat_template: this server uses the model's own; it takes a request's with --trust-request-chat-template",
            "chat_template",
        )
    return asked.chat_template


def ask_chat(service: Service, asked: ChatRequest) -> ChatAsk:
    """What a checked body asks of the model."""
    service.check_model(asked.model)
    use = asked.tool_use()
    params, parser = told_apart(service, use, asked.sampling_params(service.sampling_defaults, use))
    return ChatAsk(
        asked.messages,
        params,
        options=asked.plan_options(),
        add_special_tokens=asked.add_special_tokens,
        template=asked.template(use),
        source=_own_template(service, asked),
        parser=parser,
    )


def read_chat(service: Service, body: bytes) -> tuple[tuple[ChatRequest, ChatAsk], Plan]:
    """The body checked, and what to run. In a thread."""
    asked = read_request(body, ChatRequest)
    ask = ask_chat(service, asked)
    return (asked, ask), plan_chat(service, ask)


def add_routes(app: FastAPI, service: Service) -> None:
    def shape(asked: tuple[ChatRequest, ChatAsk], generation: Generation) -> ChatShape:
        request, ask = asked
        reader = ChatReader(generation, ask.parser) if ask.parser is not None else None
        return ChatShape(request, service.model, service.tokenizer, generation, reader)

    async def complete_chat(request: Request) -> Response:
        """Continue a chat with an assistant's message."""
        return await service.generate(
            request, lambda body: read_chat(service, body), shape, lambda asked: asked[0].stream
        )

    app.add_api_route(
        "/v1/chat/completions", complete_chat, methods=["POST"], openapi_extra=body_schema(ChatRequest)
    )
