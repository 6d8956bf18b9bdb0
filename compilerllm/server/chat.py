"""One turn of a chat, whatever API asks for it: from messages to a plan, from the output's text to its parts."""

import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import msgspec

from compilerllm.parsing.parts import CallArguments, CallStart, Content, OutputParser, Part, Reasoning
from compilerllm.runtime.messages import ThinkingMarks
from compilerllm.sampling_params import SamplingParams
from compilerllm.server.generation import PLAIN, Generation, Plan, PlanOptions
from compilerllm.server.service import Service
from compilerllm.server.tools import ToolUse
from compilerllm.text.chat import render_chat
from compilerllm.text.output import TextDelta

MakeParser = Callable[[str], OutputParser]  # a new one for each sequence; the prompt that it continues


@dataclass(frozen=True)
class ChatAsk:
    """What a chat-like API asks: the messages in OpenAI's shape, and how to go on from them.

    param: the body's field that holds the messages, for errors. template: variables and options of the chat template.
    parser: takes the output apart; None where all of it is the answer.
    """

    messages: list[Any]
    params: SamplingParams
    param: str = "messages"
    options: PlanOptions = PLAIN
    add_special_tokens: bool = False  # the template writes them
    template: dict[str, Any] = field(default_factory=dict)
    source: str | None = None  # of a chat template in place of the model's
    parser: MakeParser | None = None


def told_apart(
    service: Service, use: ToolUse, params: SamplingParams
) -> tuple[SamplingParams, MakeParser | None]:
    """What takes outputs apart, None where they are all answer, and the sampling that goes with it.

    Calls that are demanded, and outputs held to a form, have no thoughts before them.
    """
    if (forced := use.parser()) is not None:
        return params, lambda prompt: forced()
    chosen = service.output_format
    if params.structured is not None:
        chosen = replace(chosen, reasoning=None)
    tools = use.tools if use.mode == "auto" and chosen.tools is not None else ()
    if not tools and chosen.reasoning is None:
        return params, None
    hidden: frozenset[str] = frozenset()
    if chosen.special and params.skip_special_tokens:
        hidden = service.tokenizer.special_tokens
        params = msgspec.structs.replace(params, skip_special_tokens=False)
    return params, lambda prompt: chosen.parser(prompt, tools, hidden, use.parallel)


def plan_chat(service: Service, ask: ChatAsk) -> Plan:
    """Render and encode the messages. In a thread. Raises ``InvalidParameter`` naming the message."""
    text = render_chat(service.tokenizer, service.model, ask.messages, ask.source, **ask.template)
    return plan_texts(service, ask, [text])


def plan_texts(service: Service, ask: ChatAsk, texts: list[str]) -> Plan:
    """Encode what messages were rendered to; all of one template, so that all end within a thought or none does."""
    options, chosen = ask.options, service.output_format
    thoughts = None if chosen.channels else chosen.reasoning
    if ask.params.thinking_token_budget is not None and thoughts is not None:
        start, end = (
            tuple(service.tokenizer.encode(m, add_special_tokens=False))
            for m in (thoughts.start, thoughts.end)
        )
        options = replace(options, thinking=ThinkingMarks(start, end, chosen.begins_inside(texts[0])))
    return service.plan(
        texts, ask.params, options, add_special_tokens=ask.add_special_tokens, param=ask.param
    )


@dataclass(slots=True)
class CallDelta:
    """What is new of a tool call. ``call_id`` and ``name`` come with its first delta only."""

    index: int
    call_id: str | None
    name: str | None
    arguments: str


@dataclass(slots=True)
class ChatDelta(TextDelta):
    """A step's addition to a message. ``text`` is the answer's; tokens and log-probabilities are those of all parts."""

    reasoning: str = ""
    calls: list[CallDelta] = field(default_factory=list)


def join_deltas(first: TextDelta, second: TextDelta) -> TextDelta:
    """Two deltas of one sequence as one."""
    both = (first.logprobs or []) + (second.logprobs or [])
    text, tokens = first.text + second.text, first.token_ids + second.token_ids
    end = second.finish_reason, second.stop_reason
    logprobs = both if first.logprobs is not None or second.logprobs is not None else None
    if not (isinstance(first, ChatDelta) or isinstance(second, ChatDelta)):
        return TextDelta(text, tokens, logprobs, *end)
    joined = ChatDelta(text, tokens, logprobs, *end)
    for part in (first, second):
        if isinstance(part, ChatDelta):
            joined.reasoning += part.reasoning
            for call in part.calls:
                if joined.calls and joined.calls[-1].index == call.index:
                    joined.calls[-1].arguments += call.arguments
                else:
                    joined.calls.append(call)
    return joined


class Reader(Protocol):
    """Where shapes get their deltas from: a ``Generation``, or a ``ChatReader`` over one."""

    async def read(self) -> Sequence[tuple[int, TextDelta]]: ...


class ChatReader:
    """A generation's deltas with each sequence's text taken apart; ``read`` as ``Generation.read``."""

    def __init__(self, generation: Generation, make_parser: MakeParser) -> None:
        self._generation = generation
        prompts = (generation.prompt_of(i) for i in range(generation.num_sequences))
        self._parsers = [make_parser(p.text or "") for p in prompts]
        self._called = [False] * generation.num_sequences

    async def read(self) -> list[tuple[int, ChatDelta]]:
        return [(index, self._take_apart(index, new)) for index, new in await self._generation.read()]

    def _take_apart(self, index: int, new: TextDelta) -> ChatDelta:
        parser = self._parsers[index]
        parts = parser.add(new.text)
        reason = new.finish_reason
        if reason is not None:
            parts += parser.finish()
        delta = ChatDelta("", new.token_ids, new.logprobs, reason, new.stop_reason)
        for part in parts:
            _put(delta, part)
        self._called[index] |= bool(delta.calls)
        if reason == "stop" and self._called[index]:
            delta.finish_reason = "tool_calls"
        return delta


def _put(delta: ChatDelta, part: Part) -> None:
    match part:
        case Content(text):
            delta.text += text
        case Reasoning(text):
            delta.reasoning += text
        case CallStart(index, name, call_id):
            delta.calls.append(CallDelta(index, call_id or "call_" + uuid.uuid4().hex[:24], name, ""))
        case CallArguments(index, text):
            if delta.calls and delta.calls[-1].index == index:
                delta.calls[-1].arguments += text
            else:
                delta.calls.append(CallDelta(index, None, None, text))


@dataclass
class Message:
    """A whole message, put together of its deltas."""

    text: str = ""
    reasoning: str = ""
    calls: list[CallDelta] = field(default_factory=list)

    def add(self, new: TextDelta) -> None:
        self.text += new.text
        if not isinstance(new, ChatDelta):
            return
        self.reasoning += new.reasoning
        for call in new.calls:
            if call.name is not None:
                self.calls.append(CallDelta(call.index, call.call_id, call.name, call.arguments))
            else:
                self.calls[call.index].arguments += call.arguments
