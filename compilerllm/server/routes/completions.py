"""/v1/completions: prompts continued."""

from typing import Any

from fastapi import FastAPI, Request
from msgspec.structs import replace
from starlette.responses import Response

from compilerllm.errors import InvalidParameter
from compilerllm.sampling_params import SamplingParams
from compilerllm.server.chat import Message
from compilerllm.server.generation import Generation, Plan
from compilerllm.server.logprobs import CompletionLogprobs, TokenNames, join_parts
from compilerllm.server.protocol import GenerationRequest, read_request, sampling_params
from compilerllm.server.service import Service, body_schema
from compilerllm.server.shapes import Choices
from compilerllm.text.infill import infill_prompt
from compilerllm.text.output import TextDelta
from compilerllm.text.tokenizer import Tokenizer


class CompletionRequest(GenerationRequest, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /v1/completions. ``prompt``: a text, token ids, or a list of either.

    ``max_tokens`` 0 goes with ``echo``: the prompt alone, to be scored. ``best_of`` sequences are made, the ``n`` likeliest
    shown.
    """

    prompt: str | list[Any]
    max_tokens: int = 16
    logprobs: int | None = None
    echo: bool = False
    suffix: str | None = None
    best_of: int | None = None
    add_special_tokens: bool = True

    @property
    def prompt_only(self) -> bool:
        return self.echo and self.max_tokens == 0

    def sampling_params(self, defaults: dict[str, Any]) -> SamplingParams:
        if self.best_of is not None and self.best_of < self.n:
            raise InvalidParameter(f"best_of ({self.best_of}) must be at least n ({self.n})", "best_of")
        if self.picks and self.stream:
            raise InvalidParameter("best_of above n cannot be streamed: set stream to false", "best_of")
        if self.prompt_logprobs is not None and self.stream:
            raise InvalidParameter(
                "prompt_logprobs cannot be streamed: set stream to false", "prompt_logprobs"
            )
        if self.suffix and self.echo:
            raise InvalidParameter("echo cannot go with suffix", "echo")
        made = sampling_params(
            self, 1 if self.prompt_only else self.max_tokens, self.logprobs, defaults, self.form()
        )
        if self.picks:
            made = replace(made, n=self.best_of, logprobs=made.logprobs or 0)
        if self.echo and self.logprobs is not None and made.prompt_logprobs is None:
            made = replace(made, prompt_logprobs=self.logprobs)
        return made

    @property
    def picks(self) -> bool:
        """Whether more is made than shown."""
        return self.best_of is not None and self.best_of > self.n

    def prompts(self, tokenizer: Tokenizer) -> list[object]:
        """The prompts one by one, with the suffix around the gap if there is one."""
        if isinstance(self.prompt, str):
            prompts: list[Any] = [self.prompt]
        elif not self.prompt:
            raise InvalidParameter("prompt is an empty list: give at least one prompt", "prompt")
        else:
            prompts = [self.prompt] if isinstance(self.prompt[0], int) else list(self.prompt)
        if not self.suffix:
            return prompts
        if not all(isinstance(p, str) for p in prompts):
            raise InvalidParameter("suffix needs prompts that are texts", "suffix")
        return [infill_prompt(tokenizer, p, self.suffix) for p in prompts]


class CompletionShape(Choices):
    id_prefix = "cmpl-"
    object_name = chunk_name = "text_completion"

    def __init__(
        self, request: CompletionRequest, model: str, tokenizer: Tokenizer, generation: Generation
    ) -> None:
        count, top = generation.num_sequences, request.logprobs or 0
        names = TokenNames(tokenizer, request.return_tokens_as_token_ids)
        self._tokenizer, self._request = tokenizer, request
        self._logprobs = [CompletionLogprobs(names, top) for _ in range(count)]
        self._echoed = [not request.echo] * count
        super().__init__(request, model, generation, names)

    def only_text(self, index: int, new: TextDelta) -> bool:
        return self._echoed[index] and super().only_text(index, new)

    def _echo(self, index: int) -> tuple[str, dict[str, Any] | None]:
        """The prompt of a choice and its log-probabilities, the first time."""
        if self._echoed[index]:
            return "", None
        self._echoed[index] = True
        prompt = self._generation.prompt_of(index)
        scores = self._generation.prompt_scores.get(index)
        text = prompt.text if prompt.text is not None else self._tokenizer.decode(prompt.token_ids)
        if self._request.logprobs is None or scores is None:
            return text, None
        return text, self._logprobs[index].prompt(prompt.token_ids, scores)

    def read_delta(self, index: int, new: TextDelta) -> TextDelta:
        text, scores = self._echo(index)
        if scores is not None:
            self._pending[index] = scores
        if self._request.prompt_only:
            return TextDelta(text, [], None, "length", None)
        new.text = text + new.text
        return new

    def logprobs_of(self, index: int, new: TextDelta) -> Any:
        parts = [
            part for part in (self._pending.pop(index, None), self._added(index, new)) if part is not None
        ]
        return join_parts(parts) or None

    def _added(self, index: int, new: TextDelta) -> dict[str, list[Any]] | None:
        return None if self._request.logprobs is None else self._logprobs[index].add(new)

    def chunk_choice(self, index: int, new: TextDelta, logprobs: Any) -> dict[str, Any]:
        return {"index": index, "text": new.text, "logprobs": logprobs, "finish_reason": None}

    def whole_choice(self, index: int, message: Message, logprobs: list[Any]) -> dict[str, Any]:
        body = {"index": index, "text": message.text, "logprobs": join_parts(logprobs) or None}
        return body | self.of_prompt(index)

    def shown(self, choices: list[dict[str, Any]], likelihoods: list[float]) -> list[dict[str, Any]]:
        if not self._request.picks:
            return choices
        made, shown = self._request.best_of or 1, []
        for start in range(0, len(choices), made):
            order = sorted(range(start, start + made), key=lambda i: -likelihoods[i])
            shown += [choices[i] for i in order[: self._request.n]]
        return [{**choice, "index": i} for i, choice in enumerate(shown)]


def add_routes(app: FastAPI, service: Service) -> None:
    def read(body: bytes) -> tuple[CompletionRequest, Plan]:
        asked = read_request(body, CompletionRequest)
        service.check_model(asked.model)
        return asked, service.plan(
            asked.prompts(service.tokenizer),
            asked.sampling_params(service.sampling_defaults),
            asked.plan_options(),
            add_special_tokens=asked.add_special_tokens and not asked.suffix,
            param="prompt",
        )

    def shape(asked: CompletionRequest, generation: Generation) -> CompletionShape:
        return CompletionShape(asked, service.model, service.tokenizer, generation)

    async def complete(request: Request) -> Response:
        """Continue one or several prompts."""
        return await service.generate(request, read, shape, lambda asked: asked.stream)

    app.add_api_route(
        "/v1/completions", complete, methods=["POST"], openapi_extra=body_schema(CompletionRequest)
    )
