"""The body of POST /v1/responses: read, checked, and made into a turn of a chat."""

from dataclasses import dataclass, replace
from typing import Any, Literal

import msgspec

from compilerllm.errors import ContextLengthExceeded, InvalidParameter
from compilerllm.sampling_params import SamplingParams, StructuredOutput
from compilerllm.server.chat import ChatAsk, plan_chat, told_apart
from compilerllm.server.formats import one_form, read_response_format, read_structured_outputs
from compilerllm.server.generation import Plan, PlanOptions
from compilerllm.server.protocol import (
    GenerationRequest,
    StreamOptions,
    check_top_logprobs,
    read_request,
    sampling_params,
)
from compilerllm.server.routes.responses.items import Message, check_calls, instruct, merge_turns, read_items
from compilerllm.server.service import Service
from compilerllm.server.tools import ToolUse, read_tools

# Fields that change nothing about an answer here: there are no tools of the server's own to count, prompts are cached
# whatever is asked, and requests are told apart by the operator's keys.
HARMLESS = frozenset(
    {"service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention",
     "request_id", "session_id"}
)  # fmt: skip

# Fields not done yet, with the values that ask for nothing.
_NOT_YET: dict[str, tuple[Any, ...]] = {
    "access_programs": (), "background_options": (), "context_management": ([],), "conversation": (),
    "enable_response_messages": (False,), "image": (), "ec_transfer_params": (), "kv_transfer_params": (),
    "media_io_kwargs": ({},), "mm_processor_kwargs": ({},), "moderation": (), "previous_input_messages": ([],),
    "prompt": (), "return_mm_kwargs": (False,), "spaces_between_special_tokens": (True,), "vllm_xargs": ({},),
    "watermarking": (False,),
}  # fmt: skip

_LOGPROBS = "message.output_text.logprobs"
INCLUDABLE = frozenset(  # all but _LOGPROBS are of items that never come, or (encrypted thoughts) come in the open
    {_LOGPROBS, "reasoning.encrypted_content", "file_search_call.results", "web_search_call.results",
     "web_search_call.action.sources", "message.input_image.image_url", "computer_call_output.output.image_url",
     "code_interpreter_call.outputs"}
)  # fmt: skip
_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
_SHARED = (  # fields that mean what they mean in chat completions
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
    "logit_bias", "seed", "stop", "stop_token_ids", "include_stop_str_in_output", "ignore_eos", "min_tokens",
    "skip_special_tokens", "thinking_token_budget",
)  # fmt: skip


class Reasoning(msgspec.Struct, forbid_unknown_fields=True):
    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None
    context: str | None = None
    mode: str | None = None

    def __post_init__(self) -> None:
        if self.effort is not None and self.effort not in _EFFORTS:
            raise InvalidParameter(
                f"reasoning.effort must be one of {', '.join(_EFFORTS)}, but is {self.effort!r:.80}",
                "reasoning.effort",
            )
        for name, neutral in (
            ("summary", "auto"), ("generate_summary", "auto"), ("context", "auto"), ("mode", "standard"),
        ):  # fmt: skip
            value = getattr(self, name)
            if value not in (None, neutral):
                raise InvalidParameter(
                    f"reasoning.{name} {value!r:.80} is not supported: thoughts come as they are; leave it out",
                    f"reasoning.{name}",
                )


class TextOptions(msgspec.Struct, forbid_unknown_fields=True):
    format: dict[str, Any] | None = None
    verbosity: str | None = None

    def form(self) -> StructuredOutput | None:
        """The form of the answer. Raises ``InvalidParameter`` naming text.format."""
        if self.verbosity not in (None, "medium"):
            raise InvalidParameter("text.verbosity is not supported; leave it out", "text.verbosity")
        wanted = self.format
        if wanted is None:
            return None
        kind = wanted.get("type")
        if kind not in ("text", "json_object", "json_schema"):
            raise InvalidParameter(
                f"text.format.type must be text, json_object or json_schema, but is {kind!r:.80}",
                "text.format.type",
            )
        if kind == "json_schema":
            if not isinstance(wanted.get("schema"), dict):
                raise InvalidParameter(
                    "text.format.schema must be a JSON schema, an object", "text.format.schema"
                )
            wanted = {"type": kind, "json_schema": {"schema": wanted["schema"]}}
        form = read_response_format(wanted)
        return None if form is None else msgspec.structs.replace(form, param="text.format")


class ResponsesRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /v1/responses. ``input``: a text, or items."""

    input: str | list[Any]
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None
    metadata: dict[str, str] = {}
    previous_response_id: str | None = None
    store: bool = True
    background: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None
    include: list[str] = []
    top_logprobs: int = 0
    truncation: Literal["auto", "disabled"] = "disabled"
    reasoning: Reasoning | None = None
    include_reasoning: bool = True
    text: TextOptions | None = None
    tools: list[Any] = []
    tool_choice: Any = None
    parallel_tool_calls: bool = True
    user: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[str, float] = {}
    seed: int | None = None
    stop: str | list[str] = []
    stop_token_ids: list[int] = []
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: int = 0
    skip_special_tokens: bool = True
    thinking_token_budget: int | None = None
    structured_outputs: dict[str, Any] | None = None
    priority: int = 0
    cache_salt: str | None = None
    chat_template_kwargs: dict[str, Any] = {}

    @property
    def scored(self) -> bool:
        """Whether log-probabilities are wanted."""
        return _LOGPROBS in self.include or self.top_logprobs > 0

    def check(self) -> None:
        """What no single field tells. Raises ``InvalidParameter``."""
        check_include(self.include)
        check_top_logprobs(self.top_logprobs)
        if self.max_output_tokens is not None and self.max_output_tokens < 1:
            raise InvalidParameter(
                f"max_output_tokens must be at least 1, but is {self.max_output_tokens}", "max_output_tokens"
            )
        if len(self.metadata) > 16 or any(len(k) > 64 or len(v) > 512 for k, v in self.metadata.items()):
            raise InvalidParameter(
                "metadata may have 16 pairs, with keys of 64 and values of 512 characters at most", "metadata"
            )
        if self.background and not self.store:
            raise InvalidParameter(
                "background needs store to be true: its answer is fetched later", "background"
            )

    def tool_use(self) -> ToolUse:
        nested = [_nested(tool, f"tools[{i}]") for i, tool in enumerate(self.tools)]
        try:
            return read_tools(nested, self.tool_choice, self.parallel_tool_calls)
        except InvalidParameter as error:  # which names the place as chat completions have it
            place = error.param.replace(".function", "") if error.param else None
            raise InvalidParameter(str(error).replace(".function", ""), place) from error

    def sampling_params(self, defaults: dict[str, Any], use: ToolUse) -> SamplingParams:
        form = one_form(
            self.text.form() if self.text is not None else None,
            read_structured_outputs(self.structured_outputs),
            use.form(),
        )
        shared = GenerationRequest(**{name: getattr(self, name) for name in _SHARED})
        scored = self.top_logprobs if self.scored else None
        return sampling_params(shared, self.max_output_tokens, scored, defaults, form)

    def template(self, use: ToolUse) -> dict[str, Any]:
        given: dict[str, Any] = {"add_generation_prompt": True, "tools": use.for_template()}
        effort = self.reasoning.effort if self.reasoning is not None else None
        if effort is not None:
            given |= {"reasoning_effort": effort, "enable_thinking": effort != "none"}
        return given | self.chat_template_kwargs


@dataclass(frozen=True)
class Asked:
    """A request that is ready to run. ``conversation``: its messages without instructions, with what went before."""

    request: ResponsesRequest
    ask: ChatAsk
    conversation: list[Message]


def read_responses(body: bytes) -> ResponsesRequest:
    """The body alone, checked as far as it can be without the conversation that it goes on with."""
    request = read_request(body, ResponsesRequest, HARMLESS, _NOT_YET)
    request.check()
    return request


def plan_response(service: Service, request: ResponsesRequest, before: list[Message]) -> tuple[Asked, Plan]:
    """What to run. ``before``: the conversation so far. In a thread."""
    service.check_model(request.model)
    use = request.tool_use()
    conversation = merge_turns([*before, *read_items(request.input)])
    check_calls(conversation)
    params, parser = told_apart(service, use, request.sampling_params(service.sampling_defaults, use))
    ask = ChatAsk(
        instruct(request.instructions, conversation),
        params,
        param="input",
        options=PlanOptions(request.cache_salt, request.priority),
        template=request.template(use),
        parser=parser,
    )
    try:
        plan = plan_chat(service, ask)
    except ContextLengthExceeded:
        shorter = _plan_newest(service, request, ask, conversation) if request.truncation == "auto" else None
        if shorter is None:
            raise
        plan = shorter
    return Asked(request, ask, conversation), plan


def _plan_newest(
    service: Service, request: ResponsesRequest, ask: ChatAsk, conversation: list[Message]
) -> Plan | None:
    """The plan of as many of the newest messages as fit; None if not even the last does."""
    # A tool's output cannot stand without the call before it.
    starts = [i for i, message in enumerate(conversation) if i and message["role"] != "tool"]
    low, high, found = 0, len(starts) - 1, None
    while low <= high:
        middle = (low + high) // 2
        kept = instruct(request.instructions, conversation[starts[middle] :])
        try:
            found, high = plan_chat(service, replace(ask, messages=kept)), middle - 1
        except ContextLengthExceeded:
            low = middle + 1
    return found


def check_include(include: list[str]) -> None:
    for i, name in enumerate(include):
        if name not in INCLUDABLE:
            raise InvalidParameter(f"include[{i}] {name!r:.80} is not known", f"include[{i}]")


def _nested(tool: Any, at: str) -> Any:
    """A tool of this API, whose function's members stand beside its type, as chat completions have it."""
    if not isinstance(tool, dict) or tool.get("type") != "function":
        kind = tool.get("type") if isinstance(tool, dict) else tool
        raise InvalidParameter(f"{at}.type must be function; {kind!r:.80} is not supported", f"{at}.type")
    function = {name: value for name, value in tool.items() if name != "type" and value is not None}
    for name in function:
        if name not in ("name", "description", "parameters", "strict"):
            raise InvalidParameter(f"{at}.{name:.80} is not supported; leave it out", f"{at}.{name:.80}")
    return {"type": "function", "function": function}
