"""/tokenize, /detokenize, /tokenizer_info: the model's tokenizer, without the model."""

import json
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from starlette.responses import Response

from compilerllm.errors import InvalidParameter
from compilerllm.server.chat_text import chat_text
from compilerllm.server.protocol import read_request
from compilerllm.server.service import Service, body_schema, json_response, read_body
from compilerllm.server.tools import read_tools
from compilerllm.text.prompts import encode_prompt

_HARMLESS = frozenset({"request_id"})
_NOT_YET: dict[str, tuple[Any, ...]] = {"media_io_kwargs": ({},), "mm_processor_kwargs": ({},)}


class TokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /tokenize: a ``prompt``, or the ``messages`` of a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Any] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool = False
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] = {}
    tools: list[Any] = []


class DetokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /detokenize."""

    tokens: list[int]
    model: str | None = None


def add_routes(app: FastAPI, service: Service) -> None:
    def encode(body: bytes) -> dict[str, Any]:
        asked = read_request(body, TokenizeRequest, _HARMLESS, _NOT_YET)
        service.check_model(asked.model)
        if (asked.prompt is None) == (asked.messages is None):
            raise InvalidParameter("Give either prompt or messages", "prompt")
        text, special = asked.prompt, True
        if asked.messages is not None:
            tools = read_tools(asked.tools, None).for_template()
            text, special = chat_text(service, asked, tools=tools), False
        if asked.add_special_tokens is not None:
            special = asked.add_special_tokens
        param = "prompt" if asked.messages is None else "messages"
        ids = encode_prompt(service.tokenizer, text, add_special_tokens=special, param=param).token_ids
        strings = [service.tokenizer.token_name(i) for i in ids] if asked.return_token_strs else None
        limit = service.client.ready.max_model_len
        return {"count": len(ids), "max_model_len": limit, "tokens": ids, "token_strs": strings}

    def decode(body: bytes) -> dict[str, Any]:
        asked = read_request(body, DetokenizeRequest, _HARMLESS, {})
        service.check_model(asked.model)
        for i, token in enumerate(asked.tokens):
            if not 0 <= token < service.tokenizer.vocab_size:
                raise InvalidParameter(
                    f"tokens[{i}] is {token}, but ids are from 0 to {service.tokenizer.vocab_size - 1}",
                    f"tokens[{i}]",
                )
        return {"prompt": service.tokenizer.decode(asked.tokens, skip_special_tokens=False)}

    async def answer(request: Request, work: Any) -> Response:
        async def made() -> Response:
            body = await read_body(request, service.config.max_body_bytes)
            return json_response(await service.in_thread(work, body))

        return await service.respond(made)

    async def tokenize(request: Request) -> Response:
        """The token ids of a prompt or a chat."""
        return await answer(request, encode)

    async def detokenize(request: Request) -> Response:
        """The text of token ids."""
        return await answer(request, decode)

    async def tokenizer_info() -> Response:
        """The tokenizer's configuration, with the chat template."""
        return json_response(await service.in_thread(_describe, service))

    app.add_api_route("/tokenize", tokenize, methods=["POST"], openapi_extra=body_schema(TokenizeRequest))
    app.add_api_route(
        "/detokenize", detokenize, methods=["POST"], openapi_extra=body_schema(DetokenizeRequest)
    )
    if service.config.enable_tokenizer_info_endpoint:
        app.add_api_route("/tokenizer_info", tokenizer_info, methods=["GET"])


def _describe(service: Service) -> dict[str, Any]:
    path = service.tokenizer.folder / "tokenizer_config.json"
    config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    template = service.tokenizer.chat_template
    return {
        **config,
        "tokenizer_class": config.get("tokenizer_class", "PreTrainedTokenizerFast"),
        "chat_template": template.source if template is not None else None,
        "vocab_size": service.tokenizer.vocab_size,
        "eos_token_ids": list(service.tokenizer.eos_token_ids),
    }
