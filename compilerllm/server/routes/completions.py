"""/v1/completions: prompts continued."""

from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import Response

from compilerllm.errors import InvalidParameter
from compilerllm.sampling_params import SamplingParams
from compilerllm.server.chat import Message
from compilerllm.server.generation import Generation, Plan
from compilerllm.server.logprobs import CompletionLogprobs, join_parts
from compilerllm.server.protocol import GenerationRequest, read_request, sampling_params
from compilerllm.server.service import Service, body_schema
from compilerllm.server.shapes import Choices
from compilerllm.text.output import TextDelta
from compilerllm.text.tokenizer import Tokenizer


class CompletionRequest(GenerationRequest, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /v1/completions. ``prompt``: a text, token ids, or a list of either."""

    prompt: str | list[Any]
    max_tokens: int = 16
    logprobs: int | None = None

    def sampling_params(self, defaults: dict[str, Any]) -> SamplingParams:
        return sampling_params(self, self.max_tokens, self.logprobs, defaults)

    def prompts(self) -> list[object]:
        """The prompts one by one."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if not self.prompt:
            raise InvalidParameter("prompt is an empty list: give at least one prompt", "prompt")
        return [self.prompt] if isinstance(self.prompt[0], int) else list(self.prompt)


class CompletionShape(Choices):
    id_prefix = "cmpl-"
    object_name = chunk_name = "text_completion"

    def __init__(
        self, request: CompletionRequest, model: str, tokenizer: Tokenizer, generation: Generation
    ) -> None:
        count, top = generation.num_sequences, request.logprobs or 0
        self._logprobs = [CompletionLogprobs(tokenizer, top) for _ in range(count)]
        super().__init__(request, model, generation)

    def logprobs_of(self, index: int, new: TextDelta) -> Any:
        return self._logprobs[index].add(new)

    def chunk_choice(self, index: int, new: TextDelta, logprobs: Any) -> dict[str, Any]:
        return {"index": index, "text": new.text, "logprobs": logprobs, "finish_reason": None}

    def whole_choice(self, index: int, message: Message, logprobs: list[Any]) -> dict[str, Any]:
        return {"index": index, "text": message.text, "logprobs": join_parts(logprobs) or None}


def add_routes(app: FastAPI, service: Service) -> None:
    def read(body: bytes) -> tuple[CompletionRequest, Plan]:
        asked = read_request(body, CompletionRequest)
        service.check_model(asked.model)
        params = asked.sampling_params(service.sampling_defaults)
        return asked, service.plan(
            asked.prompts(), params, add_special_tokens=True, param="prompt", cache_salt=asked.cache_salt
        )

    def shape(asked: CompletionRequest, generation: Generation) -> CompletionShape:
        return CompletionShape(asked, service.model, service.tokenizer, generation)

    async def complete(request: Request) -> Response:
        """Continue one or several prompts."""
        return await service.generate(request, read, shape, lambda asked: asked.stream)

    app.add_api_route(
        "/v1/completions", complete, methods=["POST"], openapi_extra=body_schema(CompletionRequest)
    )
