"""What the routes of models that pool share: fields, inputs as token ids, and running them.

A route is a plan of what to run (made in a thread) and the shape of its answer; ``add_pooled`` does the rest.
"""

import asyncio
import base64
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import msgspec
import numpy as np
from fastapi import FastAPI, Request
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from compilerllm.errors import GenerationFailed, InvalidParameter
from compilerllm.ir.step import Float32
from compilerllm.runtime.messages import Delta, Pool, PoolingFacts
from compilerllm.runtime.messages import Request as EngineRequest
from compilerllm.sampling_params import SamplingParams
from compilerllm.server.chat_text import chat_text
from compilerllm.server.metrics import Metrics
from compilerllm.server.protocol import read_request
from compilerllm.server.records import current_record
from compilerllm.server.service import Service, body_schema, json_response, read_body
from compilerllm.server.streams import watch_disconnect
from compilerllm.text.pairs import Cut, Tokens, encode_texts
from compilerllm.text.prompts import Truncation, encode_prompt

MOST_INPUTS = 2048  # of one request, as OpenAI's API has it
_HARMLESS = frozenset({"user", "safety_identifier", "request_id"})
_NOT_YET: dict[str, tuple[Any, ...]] = {
    "cache_salt": (), "embed_dtype": ("float32",), "endianness": ("native", "little"), "instruction": (),
    "mm_processor_kwargs": ({},),
}  # fmt: skip
_DOES = {
    None: "continues texts: ask /v1/chat/completions or /v1/completions",
    "embed": "gives embeddings: ask /v1/embeddings, /score, /rerank or /pooling",
    "classify": "gives labels: ask /classify or /pooling",
}


class PoolRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What their bodies have in common. ``use_activation``: whether vectors are normalised, or labels made scores; None:
    as the model's files say. ``normalize`` and ``activation`` are its older names.
    """

    model: str | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] = "right"
    add_special_tokens: bool | None = None  # True, but for chats, whose template writes them
    priority: int = 0
    use_activation: bool | None = None
    activation: bool | None = None
    normalize: bool | None = None

    def marks_ends(self) -> bool:
        """Whether the tokenizer puts its special tokens around a text."""
        return self.add_special_tokens is not False

    def activate(self) -> bool | None:
        """What the three names say. Raises ``InvalidParameter`` where they contradict each other."""
        said = {
            n: v for n in ("use_activation", "activation", "normalize") if (v := getattr(self, n)) is not None
        }
        if len(set(said.values())) > 1:
            raise InvalidParameter(f"{' and '.join(said)} mean the same: give one of them", next(iter(said)))
        return next(iter(said.values()), None)


class InputRequest(PoolRequest, kw_only=True, forbid_unknown_fields=True):
    """A body with ``input``: a text, token ids, or a list of either; or with the ``messages`` of one chat."""

    input: str | list[Any] | None = None
    messages: list[Any] | None = None
    add_generation_prompt: bool = False
    continue_final_message: bool = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] = {}

    def marks_ends(self) -> bool:
        return super().marks_ends() if self.messages is None else self.add_special_tokens is True

    @property
    def param(self) -> str:
        """The field that is at fault where an input is."""
        return "input" if self.messages is None else "messages"

    def inputs(self, service: Service) -> list[Any]:
        """The inputs one by one."""
        if (self.input is None) == (self.messages is None):
            raise InvalidParameter("Give either input or messages", "input")
        if self.messages is not None:
            return [chat_text(service, self)]
        if isinstance(self.input, str):
            return [self.input]
        if not self.input or len(self.input) > MOST_INPUTS:
            raise InvalidParameter(f"input must be a text, or a list of 1 to {MOST_INPUTS} of them", "input")
        return [self.input] if isinstance(self.input[0], int) else self.input


@dataclass(frozen=True)
class Work:
    """What a request has the engine run: every input in the same way."""

    inputs: list[Tokens]
    pool: Pool


Asked = TypeVar("Asked", bound=PoolRequest)
Plan = Callable[[Service, Asked], Work]
Shape = Callable[[Service, Asked, Work, list[Float32]], dict[str, Any]]


def pooling_facts(service: Service, tasks: tuple[str, ...], what: str) -> PoolingFacts:
    """What the model is. Raises ``InvalidParameter`` where it does none of ``tasks``; ``what`` it then cannot do."""
    facts = service.client.ready.pooling
    task = None if facts is None else facts.task
    if facts is None or task not in tasks:
        raise InvalidParameter(
            f"{service.model} cannot {what} ({' or '.join(tasks)}): it {_DOES[task]}", "model"
        )
    return facts


def encode_input(service: Service, asked: InputRequest, given: object) -> Tokens:
    """A text or token ids as the model is to see them. Raises ``InvalidParameter`` naming the field."""
    param = asked.param
    if isinstance(given, str):
        return encode_pair(service, asked, given, None, Cut(), (param, param))
    limit, cut = service.client.ready.max_model_len, asked.truncate_prompt_tokens
    prompt = encode_prompt(service.tokenizer, given, param=param)
    if cut is not None:
        prompt = Truncation(cut, asked.truncation_side).apply(prompt, limit)
    return Tokens(prompt.token_ids).checked(limit, param)


def encode_pair(
    service: Service, asked: PoolRequest, first: str, second: str | None, cut: Cut, params: tuple[str, str]
) -> Tokens:
    """One text, or two of which the model sees that they are two. ``params``: how errors call them."""
    limit = service.client.ready.max_model_len
    if (most := asked.truncate_prompt_tokens) is not None:
        Truncation(most)  # checks it
        cut = Cut(limit if most == -1 else most, cut.first, cut.second, asked.truncation_side)
    special = asked.marks_ends()
    return encode_texts(service.tokenizer, first, second, params, special, cut, limit).checked(
        limit, params[-1]
    )


def add_pooled(
    app: FastAPI,
    service: Service,
    paths: Iterable[str],
    summary: str,
    kind: type[Asked],
    plan: Plan[Asked],
    shape: Shape[Asked],
) -> None:
    """Routes that answer bodies of ``kind`` under ``paths``."""

    def read(body: bytes) -> tuple[Asked, Work]:
        asked = read_request(body, kind, _HARMLESS, _NOT_YET)
        service.check_model(asked.model)
        service.check_priority(asked.priority)
        return asked, plan(service, asked)

    async def pool(request: Request) -> Response:
        async def answer() -> Response:
            body = await read_body(request, service.config.max_body_bytes)
            asked, work = await service.in_thread(read, body)
            results = await _run(service, work, asked.priority, request)
            return json_response(await service.in_thread(shape, service, asked, work, results))

        return await service.respond(answer)

    for path in paths:
        app.add_api_route(
            path, pool, methods=["POST"], summary=summary, name=path, openapi_extra=body_schema(kind)
        )


async def _run(service: Service, work: Work, priority: int, request: Request) -> list[Float32]:
    """What the engine gives for each input, in order. Raises ``ClientDisconnect`` if nobody waits any more."""
    name, arrived, metrics, record = uuid.uuid4().hex, time.monotonic(), service.metrics, current_record()
    feed = service.streams.submit(
        [
            EngineRequest(
                request_id=f"{name}-{i}",
                prompt_token_ids=one.ids,
                params=SamplingParams(),
                arrival_time=arrived,
                pool=msgspec.structs.replace(work.pool, second=one.second),
                priority=priority,
            )
            for i, one in enumerate(work.inputs)
        ]
    )
    if record is not None:
        record.num_sequences += len(work.inputs)
        record.prompt_tokens += sum(len(one.ids) for one in work.inputs)
    found: dict[int, Float32] = {}
    ends: Counter[str] = Counter()  # inputs by how they ended
    watcher = asyncio.create_task(watch_disconnect(request.receive, feed))
    try:
        while deltas := await feed.read():
            for delta in deltas:
                if delta.embedding is None:
                    ends["error"] += 1
                    raise GenerationFailed(delta.error or "the engine gave no vector")
                index = int(delta.request_id.rpartition("-")[2])
                found[index] = np.frombuffer(delta.embedding, np.float32)
                ends["stop"] += 1
                _observe(metrics, len(work.inputs[index].ids), delta, arrived)
    finally:
        watcher.cancel()
        feed.close()
        ends["abort"] = len(work.inputs) - ends.total()
        for reason in ends.elements():
            metrics.finished(reason)
        if record is not None:
            record.finish_reasons += ends
    if len(found) < len(work.inputs):
        raise ClientDisconnect
    return [found[i] for i in range(len(work.inputs))]


def _observe(metrics: Metrics, tokens: int, delta: Delta, arrived: float) -> None:
    """An input of so many tokens that has its vector."""
    metrics.prompt_tokens.observe(tokens)
    metrics.prompt_computed(tokens, 0)
    metrics.queue_time.observe(delta.queue_seconds)
    metrics.prefill_time.observe(delta.prefill_seconds)
    metrics.inference_time.observe(delta.prefill_seconds)
    metrics.e2e.observe(time.monotonic() - arrived)


def encoded(values: Float32, encoding_format: str) -> Any:
    """Numbers as lists, or as the base64 of little-endian float32, row after row."""
    if encoding_format == "base64":
        return base64.b64encode(values.astype("<f4").tobytes()).decode()
    return values.tolist()


def head(service: Service, prefix: str) -> dict[str, Any]:
    """Id, time and model of an answer."""
    return {"id": f"{prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": service.model}


def usage(work: Work) -> dict[str, int]:
    """Tokens read; none are written."""
    tokens = sum(len(one.ids) for one in work.inputs)
    return {"prompt_tokens": tokens, "total_tokens": tokens, "completion_tokens": 0}
