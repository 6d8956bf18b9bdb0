"""The body of POST /v1/messages: Anthropic's fields and content blocks, made into a turn of a chat."""

import json
from typing import Any, TypeVar

import msgspec

from compilerllm.errors import InvalidParameter
from compilerllm.sampling_params import SamplingParams, StructuredOutput
from compilerllm.server.formats import one_form, schema_form
from compilerllm.server.generation import PlanOptions
from compilerllm.server.protocol import GenerationRequest, read_request, sampling_params
from compilerllm.server.tools import ToolUse, read_tools

# Fields that change nothing about an answer here: prompts are cached whatever is asked.
_HARMLESS = frozenset({"metadata", "service_tier", "cache_control"})
_NOT_YET: dict[str, tuple[Any, ...]] = {
    "container": (), "context_management": ({"edits": []},), "diagnostics": (), "ec_transfer_params": (),
    "inference_geo": (), "kv_transfer_params": (), "mcp_servers": ([],), "return_mm_kwargs": (False,),
    "speed": ("standard",), "user_profile_id": (), "vllm_xargs": ({},), "watermarking": (False,),
    "workspace_id": (),
}  # fmt: skip
_EFFORTS = ("low", "medium", "high", "xhigh", "max")
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
Message = dict[str, Any]


class MessagesRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /v1/messages."""

    messages: list[Any]
    max_tokens: int
    model: str | None = None
    system: str | list[Any] | None = None
    stop_sequences: list[str] = []
    stream: bool = False
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    tools: list[Any] = []
    tool_choice: dict[str, Any] | None = None
    cache_salt: str | None = None
    chat_template_kwargs: dict[str, Any] = {}

    @property
    def hides_thoughts(self) -> bool:
        return (self.thinking or {}).get("display") == "omitted"

    def tool_use(self) -> ToolUse:
        choice = self.tool_choice or {}
        _check_fields(choice, {"type", "name", "disable_parallel_tool_use"}, "tool_choice")
        kind: Any = choice.get("type", "auto")
        if kind == "tool":
            wanted: Any = {"type": "function", "function": {"name": choice.get("name")}}
        elif isinstance(kind, str) and kind in _CHOICES:
            wanted = _CHOICES[kind]
        else:
            raise InvalidParameter(
                f"tool_choice.type must be auto, any, tool or none, but is {kind!r:.80}", "tool_choice.type"
            )
        tools = [_read_tool(tool, f"tools[{i}]") for i, tool in enumerate(self.tools)]
        try:
            return read_tools(tools, wanted, not choice.get("disable_parallel_tool_use", False))
        except InvalidParameter as error:  # which names the place as chat completions have it
            names = {".function.parameters": ".input_schema", ".function": ""}
            message, param = str(error), error.param or ""
            for theirs, ours in names.items():
                message, param = message.replace(theirs, ours), param.replace(theirs, ours)
            raise InvalidParameter(message, param) from error

    def sampling_params(self, defaults: dict[str, Any], use: ToolUse) -> SamplingParams:
        if self.max_tokens < 1:
            raise InvalidParameter(f"max_tokens must be at least 1, but is {self.max_tokens}", "max_tokens")
        if not all(self.stop_sequences):
            raise InvalidParameter("stop_sequences must be non-empty texts", "stop_sequences")
        shared = GenerationRequest(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            stop=self.stop_sequences,
            thinking_token_budget=self._thinking_budget(),
        )
        return sampling_params(shared, self.max_tokens, None, defaults, one_form(self._form(), use.form()))

    def _form(self) -> StructuredOutput | None:
        config = self.output_config or {}
        _check_fields(config, {"format", "effort"}, "output_config")
        wanted = config.get("format")
        if wanted is None:
            return None
        schema = (
            wanted.get("schema") if isinstance(wanted, dict) and wanted.get("type") == "json_schema" else None
        )
        if not isinstance(schema, dict):
            raise InvalidParameter(
                'output_config.format must be {"type": "json_schema", "schema": {...}}',
                "output_config.format",
            )
        return schema_form(schema, "output_config.format")

    def _thinking_budget(self) -> int | None:
        """Tokens that a thought may have."""
        if self.thinking is None:
            return None
        _check_fields(self.thinking, {"type", "budget_tokens", "display"}, "thinking")
        if self.thinking.get("display") not in (None, "summarized", "omitted"):
            raise InvalidParameter("thinking.display must be summarized or omitted", "thinking.display")
        kind, budget = self.thinking.get("type"), self.thinking.get("budget_tokens")
        if kind in ("disabled", "adaptive"):
            return None
        if kind != "enabled":
            raise InvalidParameter("thinking.type must be enabled, disabled or adaptive", "thinking.type")
        if type(budget) is not int or not 1 <= budget < self.max_tokens:
            raise InvalidParameter(
                "thinking.budget_tokens must be a whole number of at least 1 and below max_tokens",
                "thinking.budget_tokens",
            )
        return budget

    def plan_options(self) -> PlanOptions:
        return PlanOptions(self.cache_salt)

    def template(self, use: ToolUse) -> dict[str, Any]:
        """What the chat template is given beside the messages. A message of the assistant's at the end is gone on with."""
        goes_on = bool(self.messages) and _role(self.messages[-1]) == "assistant"
        given: dict[str, Any] = {
            "add_generation_prompt": not goes_on,
            "continue_final_message": goes_on,
            "tools": use.for_template(),
        }
        if self.thinking is not None:
            given["enable_thinking"] = self.thinking.get("type") != "disabled"
        effort = (self.output_config or {}).get("effort")
        if effort is not None:
            if effort not in _EFFORTS:
                raise InvalidParameter(
                    f"output_config.effort must be one of {', '.join(_EFFORTS)}, but is {effort!r:.80}",
                    "output_config.effort",
                )
            given["reasoning_effort"] = effort
        return given | self.chat_template_kwargs

    def chat_messages(self) -> list[Message]:
        """The conversation in OpenAI's shape. Raises ``InvalidParameter`` naming the block."""
        if not self.messages:
            raise InvalidParameter("messages is an empty list: give at least one message", "messages")
        chat: list[Message] = []
        if self.system is not None:
            chat.append({"role": "system", "content": _text(self.system, "system")})
        for i, message in enumerate(self.messages):
            for read in _read_message(message, f"messages[{i}]"):
                _append(chat, read)
        if "tool_calls" in chat[-1]:
            raise InvalidParameter("messages must not end with a call: its result is to follow", "messages")
        return chat


class CountRequest(MessagesRequest, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /v1/messages/count_tokens."""

    max_tokens: int = 1 << 30  # not a part of the question


_R = TypeVar("_R", bound=MessagesRequest)


def read_messages_request(body: bytes, kind: type[_R]) -> _R:
    return read_request(body, kind, _HARMLESS, _NOT_YET)


def _role(message: Any) -> Any:
    return message.get("role") if isinstance(message, dict) else None


def _append(chat: list[Message], message: Message) -> None:
    """Turns of one role that follow each other are one, as Anthropic has it."""
    last = chat[-1] if chat else None
    if last is None or last["role"] != message["role"] or message["role"] == "tool":
        chat.append(message)
        return
    last["content"] = "\n".join(filter(None, (last["content"], message["content"])))
    for name in ("tool_calls", "reasoning"):
        if name in message:
            last[name] = last[name] + message[name] if name in last else message[name]


def _read_message(message: Any, at: str) -> list[Message]:
    role = _role(message)
    if role not in ("user", "assistant", "system"):
        raise InvalidParameter(
            f"{at}.role must be user, assistant or system, but is {role!r:.80}", f"{at}.role"
        )
    _check_fields(message, {"role", "content"}, at)
    content = message.get("content")
    if role == "system" or isinstance(content, str):
        return [{"role": role, "content": _text(content, f"{at}.content")}]
    if not isinstance(content, list):
        raise InvalidParameter(f"{at}.content must be a text or a list of blocks", f"{at}.content")
    return [_read_block(block, role, f"{at}.content[{i}]") for i, block in enumerate(content)]


def _read_block(block: Any, role: str, at: str) -> Message:
    kind = block.get("type") if isinstance(block, dict) else None
    if kind == "text":
        return {"role": role, "content": _text_block(block, at)}
    if kind == "tool_result" and role == "user":
        _check_fields(block, {"type", "tool_use_id", "content", "is_error", "cache_control"}, at)
        content = _text(block.get("content") or "", f"{at}.content")
        # Templates have no other place for it.
        content = f"Error: {content}" if block.get("is_error") else content
        return {"role": "tool", "tool_call_id": _member(block, "tool_use_id", str, at), "content": content}
    if kind == "tool_use" and role == "assistant":
        _check_fields(block, {"type", "id", "name", "input", "cache_control", "caller"}, at)
        given = json.dumps(_member(block, "input", dict, at), ensure_ascii=False)
        function = {"name": _member(block, "name", str, at), "arguments": given}
        call = {"id": _member(block, "id", str, at), "type": "function", "function": function}
        return {"role": role, "content": "", "tool_calls": [call]}
    if kind == "thinking" and role == "assistant":
        _check_fields(block, {"type", "thinking", "signature"}, at)
        return {"role": role, "content": "", "reasoning": _member(block, "thinking", str, at)}
    known = "text and tool_result" if role == "user" else "text, thinking and tool_use"
    raise InvalidParameter(
        f"{at}.type must be one of {known}; {kind!r:.80} is not supported here", f"{at}.type"
    )


def _text(content: Any, at: str) -> str:
    """A text, or the texts of blocks joined by newlines."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidParameter(f"{at} must be a text or a list of text blocks, but is {content!r:.80}", at)
    return "\n".join(_text_block(block, f"{at}[{i}]") for i, block in enumerate(content))


def _text_block(block: Any, at: str) -> str:
    if not isinstance(block, dict) or block.get("type") != "text" or not isinstance(block.get("text"), str):
        raise InvalidParameter(
            f'{at} must be {{"type": "text", "text": ...}}; other blocks are not supported here', at
        )
    _check_fields(block, {"type", "text", "cache_control"}, at)
    text: str = block["text"]
    return text


def _read_tool(tool: Any, at: str) -> Any:
    """A tool as chat completions have it."""
    if not isinstance(tool, dict):
        raise InvalidParameter(f"{at} must be an object with a name and an input_schema", at)
    if tool.get("type") not in (None, "custom"):
        raise InvalidParameter(
            f"{at}.type {tool['type']!r:.80} is not supported: this server has no tools of its own",
            f"{at}.type",
        )
    neutral = {"defer_loading": False, "allowed_callers": ["direct"], "eager_input_streaming": False}
    known = {"type", "name", "description", "input_schema", "strict", "cache_control"}
    _check_fields({k: v for k, v in tool.items() if neutral.get(k) != v}, known, at)
    schema = _member(tool, "input_schema", dict, at)
    function = {k: tool[k] for k in ("name", "description", "strict") if k in tool}
    return {"type": "function", "function": {**function, "parameters": schema}}


def _member(block: Message, name: str, kind: type, at: str) -> Any:
    value = block.get(name)
    if not isinstance(value, kind):
        raise InvalidParameter(
            f"{at}.{name} must be {'a text' if kind is str else 'an object'}", f"{at}.{name}"
        )
    return value


def _check_fields(block: Message, known: set[str], at: str) -> None:
    for name, value in block.items():
        if name not in known and value not in (None, [], {}):
            raise InvalidParameter(f"{at}.{name:.80} is not supported; leave it out", f"{at}.{name:.80}")
