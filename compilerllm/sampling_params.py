"""How the tokens of one request are chosen, and when it ends."""

import math
from typing import Any, Literal

import msgspec

from compilerllm.errors import InvalidParameter

MAX_LOGPROBS = 20


class RepetitionDetection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An output ends when its last ``min_count`` pieces of the same length, within the bounds in tokens, are equal."""

    max_pattern_size: int
    min_pattern_size: int = 1
    min_count: int = 2

    def __post_init__(self) -> None:
        if not (1 <= self.min_pattern_size <= self.max_pattern_size <= 1024 and 2 <= self.min_count <= 1024):
            raise InvalidParameter(
                "repetition_detection needs 1 <= min_pattern_size <= max_pattern_size <= 1024 and min_count from 2 to 1024",
                "repetition_detection",
            )


class StructuredOutput(msgspec.Struct, frozen=True, kw_only=True):
    """The form that an output must have. ``text`` says it: a JSON schema, a regular expression, a list of choices as JSON, a
    grammar (EBNF, or Lark's), a structural tag as JSON; nothing for any JSON object. ``param``: the request's field."""

    kind: Literal["json", "json_object", "regex", "choice", "grammar", "structural_tag"]
    text: str = ""
    any_whitespace: bool = True  # JSON may be laid out; else it is written without spaces
    additional_properties: bool = True  # a schema that is silent about other members allows them
    param: str = "structured_outputs"


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Sampling of one request; the names are those of OpenAI's API and of vLLM.

    ``temperature`` 0 is greedy. ``top_k`` 0 or -1 is off. ``seed`` makes a request repeatable on the same model and
    target in an equal batch. In another batch rows are rounded differently, and a choice near a boundary may fall on
    its other side: within some tokens in bfloat16, within some hundreds in float32. ``logprobs`` is how many most
    likely tokens are reported beside the chosen one (at most 20). ``max_tokens`` None means up to the context's end.
    ``prompt_logprobs`` reports on the prompt's tokens in the same way, and reads no shared blocks. ``allowed_token_ids``
    and ``bad_words`` say what may come, ``thinking_token_budget`` how many tokens a thought may have.
    ``detokenize`` False leaves the text empty, so that it cannot go with ``stop``.

    Raises ``InvalidParameter``, naming the field, for a value outside its range.
    """

    n: int = 1
    max_tokens: int | None = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    detokenize: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: dict[int, float] = {}
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()
    thinking_token_budget: int | None = None
    repetition_detection: RepetitionDetection | None = None
    structured: StructuredOutput | None = None

    def __post_init__(self) -> None:
        if isinstance(self.stop, str | list):  # a plain string or list, as OpenAI's clients send it
            force = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
            msgspec.structs.force_setattr(self, "stop", force)
        for name in ("stop_token_ids", "allowed_token_ids", "bad_words"):
            if isinstance(value := getattr(self, name), list):
                msgspec.structs.force_setattr(self, name, tuple(value))
        self._check_range("n", 1, 128)
        self._check_range("max_tokens", 1, None)
        self._check_range("min_tokens", 0, None)
        self._check_range("temperature", 0.0, 100.0)
        self._check_range("top_p", 0.0, 1.0, open_low=True)
        self._check_range("top_k", -1, None)
        self._check_range("min_p", 0.0, 1.0)
        self._check_range("repetition_penalty", 0.0, 100.0, open_low=True)
        self._check_range("presence_penalty", -2.0, 2.0)
        self._check_range("frequency_penalty", -2.0, 2.0)
        self._check_range("seed", -(2**63), 2**64 - 1)
        self._check_range("logprobs", 0, MAX_LOGPROBS)
        self._check_range("prompt_logprobs", 0, MAX_LOGPROBS)
        self._check_range("thinking_token_budget", 0, None)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidParameter(
                f"min_tokens ({self.min_tokens}) is larger than max_tokens ({self.max_tokens})", "min_tokens"
            )
        if any(not isinstance(s, str) or not s for s in self.stop):
            raise InvalidParameter("stop must be non-empty strings", "stop")
        if self.stop and not self.detokenize:
            raise InvalidParameter("stop needs the text: it cannot go with detokenize=False", "stop")
        for name in ("stop_token_ids", "allowed_token_ids"):
            ids = getattr(self, name) or ()
            if any(isinstance(t, bool) or not isinstance(t, int) or t < 0 for t in ids):
                raise InvalidParameter(f"{name} must be non-negative integers", name)
        if self.allowed_token_ids == ():
            raise InvalidParameter("allowed_token_ids is empty: no token could come", "allowed_token_ids")
        if any(not isinstance(s, str) or not s for s in self.bad_words):
            raise InvalidParameter("bad_words must be non-empty strings", "bad_words")
        for token, bias in self.logit_bias.items():
            if not isinstance(token, int) or not isinstance(bias, int | float) or not -100 <= bias <= 100:
                raise InvalidParameter(
                    f"logit_bias maps token ids to numbers from -100 to 100, but has {token!r}: {bias!r}",
                    "logit_bias",
                )

    def _check_range(self, name: str, low: float, high: float | None, *, open_low: bool = False) -> None:
        value: Any = getattr(self, name)
        if value is None:
            if name in _MAY_BE_NONE:
                return
            raise InvalidParameter(f"{name} must be a number, but is null", name)
        whole = name in _WHOLE
        kind = int if whole else (int, float)
        if (
            isinstance(value, bool)
            or not isinstance(value, kind)
            or (isinstance(value, float) and math.isnan(value))
        ):
            raise InvalidParameter(
                f"{name} must be a {'whole ' if whole else ''}number, but is {value!r}", name
            )
        if value < low or (open_low and value == low) or (high is not None and value > high):
            bound = f"{'above' if open_low else 'at least'} {low:g}" + (
                f" and at most {high:g}" if high is not None else ""
            )
            raise InvalidParameter(f"{name} must be {bound}, but is {value}", name)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def penalised(self) -> bool:
        """Whether token counts of this request change its logits."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


_MAY_BE_NONE = frozenset({"max_tokens", "seed", "logprobs", "prompt_logprobs", "thinking_token_budget"})
_WHOLE = _MAY_BE_NONE | {"n", "min_tokens", "top_k"}
