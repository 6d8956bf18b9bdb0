"""Request bodies: fields that generating routes have in common, how bodies are read, and how they become sampling parameters.

A field that is not listed is refused by name. Fields of OpenAI's or vLLM's API that we do not do yet are refused too,
unless they hold the value that asks for nothing.
"""

import difflib
import math
import re
from typing import Any, Literal, TypeVar

import msgspec

from compilerllm.errors import InvalidParameter
from compilerllm.runtime.beams import BeamOptions
from compilerllm.sampling_params import RepetitionDetection, SamplingParams, StructuredOutput
from compilerllm.server.errors import MalformedBody, UnknownField
from compilerllm.server.formats import GUIDED, one_form, read_response_format, read_structured_outputs
from compilerllm.server.generation import PlanOptions
from compilerllm.text.prompts import Truncation

# Fields that change nothing about the answer, so that ignoring them misleads nobody.
HARMLESS = frozenset(
    {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
     "request_id", "session_id"}
)  # fmt: skip

# Fields not done yet, with the values that ask for nothing.
_NOT_YET: dict[str, tuple[Any, ...]] = {
    "audio": (), "best_of": (1,), "ec_transfer_params": (), "function_call": ("none",), "functions": ([],),
    "kv_transfer_params": (), "logprob_token_ids": ([],), "media_io_kwargs": ({},),
    "mm_processor_kwargs": ({},), "modalities": (["text"],), "prediction": (), "prompt_embeds": (),
    "return_mm_kwargs": (False,), "return_token_offsets": (False,), "return_weight_versions": (False,),
    "routed_experts_prompt_start": (0,), "spaces_between_special_tokens": (True,), "suffix": ("",),
    "tool_choice": ("none",), "tools": ([],), "verbosity": (), "vllm_xargs": ({},),
    "watermarking": (False,), "web_search_options": (),
}  # fmt: skip


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool = False  # random padding of OpenAI's own service; there is none here


class GenerationRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What chat and text completions have in common. None means: the model's default."""

    model: str | None = None
    n: int = 1
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
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] = []
    prompt_logprobs: int | None = None
    thinking_token_budget: int | None = None
    repetition_detection: RepetitionDetection | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: Any = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] = "left"
    priority: int = 0
    stream: bool = False
    stream_options: StreamOptions | None = None
    stream_interval: int = 1
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    cache_salt: str | None = None
    use_beam_search: bool = False
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False

    def form(self) -> StructuredOutput | None:
        """The form that the output must have."""
        guided = {kind: value for name, kind in GUIDED.items() if (value := getattr(self, name)) is not None}
        return one_form(
            read_response_format(self.response_format),
            read_structured_outputs(self.structured_outputs),
            read_structured_outputs(guided) if guided else None,
        )

    def plan_options(self) -> PlanOptions:
        """What is not sampling."""
        cut = self.truncate_prompt_tokens
        return PlanOptions(
            self.cache_salt,
            self.priority,
            None if cut is None else Truncation(cut, self.truncation_side),
            beams=self._beams(),
        )

    def _beams(self) -> BeamOptions | None:
        """The beam search that is wanted. Raises ``UnknownField`` for a field that has no meaning beside it, or without it."""
        defaults = {field.name: field.default for field in msgspec.structs.fields(type(self))}
        given = [n for n, value in defaults.items() if getattr(self, n) not in (value, None, [], {})]
        if not self.use_beam_search:
            for name in ("length_penalty", "early_stopping"):
                if name in given:
                    raise UnknownField(f"{name} goes with use_beam_search", name)
            return None
        for name in given:
            if name in _SAMPLING or (name == "temperature" and self.temperature not in (0.0, 1.0)):
                raise UnknownField(f"{name} cannot go with use_beam_search; leave it out", name)
        if not math.isfinite(self.length_penalty) or abs(self.length_penalty) > 100:
            raise InvalidParameter("length_penalty must be from -100 to 100", "length_penalty")
        return BeamOptions(self.length_penalty, self.early_stopping)

    @property
    def usage_at_end(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def usage_always(self) -> bool:
        return self.stream_options is not None and self.stream_options.continuous_usage_stats


# What a beam search does not do, or does by itself.
_SAMPLING = frozenset(
    {"top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "stop",
     "min_tokens", "allowed_token_ids", "bad_words", "prompt_logprobs", "thinking_token_budget", "repetition_detection",
     "response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar", "stream",
     "logprobs", "top_logprobs", "best_of", "echo", "tools"}
)  # fmt: skip
_DEFAULTED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_R = TypeVar("_R", bound=msgspec.Struct)


def read_request(
    body: bytes,
    kind: type[_R],
    harmless: frozenset[str] = HARMLESS,
    not_yet: dict[str, tuple[Any, ...]] = _NOT_YET,
) -> _R:
    """Decode and check a body. Raises ``InvalidParameter`` (or a kind of it) that names the field.

    ``harmless`` fields are dropped; ``not_yet``: fields that are taken with these values only.
    """
    try:
        fields = msgspec.json.decode(body)
    except (msgspec.MsgspecError, ValueError) as error:
        raise MalformedBody(f"The request body is no valid JSON: {error}") from error
    except RecursionError as error:
        raise MalformedBody("The request body is nested too deeply") from error
    if not isinstance(fields, dict):
        raise MalformedBody("The request body must be a JSON object")
    fields = {name: value for name, value in fields.items() if value is not None and name not in harmless}
    known = kind.__struct_fields__
    for name in [name for name in fields if name not in known]:
        _refuse_unless_neutral(name, fields.pop(name), known, not_yet)
    try:
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        raise _name_field(str(error)) from error


def _refuse_unless_neutral(
    name: str, value: object, known: tuple[str, ...], not_yet: dict[str, tuple[Any, ...]]
) -> None:
    neutral = not_yet.get(name)
    if neutral is None:
        near = difflib.get_close_matches(name, known, 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise UnknownField(f"Unknown field {name!r:.200}{hint}", name[:200])
    if not any(type(value) is type(n) and value == n for n in neutral):
        raise UnknownField(f"{name} is not supported yet; leave it out", name)


def _name_field(message: str) -> InvalidParameter:
    """msgspec says "Expected `int`, got `str` - at `$.top_k`"; a client wants the field first."""
    found = re.fullmatch(r"(.*) - at `\$\.?(.*)`", message, re.DOTALL)
    if found is None:
        missing = re.search(r"missing required field `(\w+)`", message)
        return InvalidParameter(message, missing[1] if missing else None)
    what, place = re.sub(r"`([\w |]+)`", lambda types: _in_words(types[1]), found[1]), found[2]
    return InvalidParameter(f"{place}: {what[:1].lower()}{what[1:]}", place or None)


_WORDS = {"float": "a number", "int": "a whole number", "str": "a text", "bool": "true or false",
          "array": "a list", "object": "an object"}  # fmt: skip


def _in_words(types: str) -> str:
    """ "str | array | null" is "a text or a list"; what is no list of types stays as it is."""
    return " or ".join(_WORDS.get(kind, kind) for kind in types.split(" | ") if kind != "null")


def sampling_params(
    request: GenerationRequest,
    max_tokens: int | None,
    logprobs: int | None,
    defaults: dict[str, Any],
    form: StructuredOutput | None = None,
) -> SamplingParams:
    """``defaults``: the model's own, for what the request leaves open; ``form``: of the output."""
    chosen = {name: getattr(request, name) for name in _DEFAULTED if getattr(request, name) is not None}
    return SamplingParams(
        n=request.n,
        max_tokens=max_tokens,
        min_tokens=request.min_tokens,
        presence_penalty=request.presence_penalty,
        frequency_penalty=request.frequency_penalty,
        seed=request.seed,
        stop=(request.stop,) if isinstance(request.stop, str) else tuple(request.stop),
        stop_token_ids=tuple(request.stop_token_ids),
        include_stop_str_in_output=request.include_stop_str_in_output,
        ignore_eos=request.ignore_eos,
        skip_special_tokens=request.skip_special_tokens,
        logprobs=logprobs,
        prompt_logprobs=request.prompt_logprobs,
        allowed_token_ids=None if request.allowed_token_ids is None else tuple(request.allowed_token_ids),
        bad_words=tuple(request.bad_words),
        thinking_token_budget=request.thinking_token_budget,
        repetition_detection=request.repetition_detection,
        structured=form,
        logit_bias=_read_bias(request.logit_bias),
        **{**defaults, **chosen},
    )


def _read_bias(bias: dict[str, float]) -> dict[int, float]:
    try:
        return {int(token): value for token, value in bias.items()}
    except ValueError as error:
        raise InvalidParameter(f"logit_bias maps token ids to numbers: {error}", "logit_bias") from error


def check_top_logprobs(value: int) -> None:
    if not 0 <= value <= 20:
        raise InvalidParameter(f"top_logprobs must be from 0 to 20, but is {value}", "top_logprobs")


def sampling_defaults(generation_config: dict[str, Any]) -> dict[str, Any]:
    """The sampling that a model's generation_config.json recommends, for requests that do not choose."""
    given = {name: generation_config.get(name) for name in _DEFAULTED}
    return {name: value for name, value in given.items() if isinstance(value, int | float)}
