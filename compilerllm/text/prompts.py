"""Prompts as users give them, made into token ids that fit the model."""

from dataclasses import dataclass
from typing import Any

import msgspec

from compilerllm.errors import ContextLengthExceeded, InvalidParameter
from compilerllm.sampling_params import SamplingParams
from compilerllm.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Prompt:
    """A prompt ready for the engine. ``text`` is None if it came as token ids."""

    text: str | None
    token_ids: list[int]


def encode_prompt(
    tokenizer: Tokenizer,
    prompt: object,
    *,
    add_special_tokens: bool = True,
    param: str = "prompt",
    max_model_len: int | None = None,
) -> Prompt:
    """Read a text, a list of token ids, {"prompt": text} or {"prompt_token_ids": [...]}.

    Raises ``InvalidParameter`` for anything else, an empty prompt, or text that is not valid Unicode, and
    ``ContextLengthExceeded`` for a text so long that it need not be encoded to know that ``max_model_len`` tokens do
    not hold it. Whether ids are in the vocabulary is the engine's to check.
    """
    if isinstance(prompt, dict):
        prompt = _unwrap(prompt, param)
    if isinstance(prompt, str):
        least = tokenizer.fewest_tokens(prompt)
        if max_model_len is not None and least >= max_model_len:
            raise too_long(least, 1, max_model_len, param, at_least=True)
        encoded = Prompt(prompt, _encode_text(tokenizer, prompt, add_special_tokens, param))
    elif isinstance(prompt, list | tuple):
        encoded = Prompt(None, _check_ids(list(prompt), param))
    else:
        raise InvalidParameter(f"{param} must be a text or a list of token ids, but is {prompt!r:.80}", param)
    if not encoded.token_ids:
        raise InvalidParameter(f"{param} is empty: give at least one token", param)
    return encoded


def _encode_text(tokenizer: Tokenizer, text: str, add_special_tokens: bool, param: str) -> list[int]:
    check_unicode(text, param)
    return tokenizer.encode(text, add_special_tokens)


def check_unicode(text: str, param: str) -> None:
    """Raises ``InvalidParameter`` for a text that no bytes are of."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        message = f"{param} is not valid Unicode: lone surrogate at character {error.start}"
        raise InvalidParameter(message, param) from error


def _unwrap(prompt: dict[str, Any], param: str) -> object:
    for name in prompt:
        if name not in ("prompt", "prompt_token_ids"):
            raise InvalidParameter(f"{param} has an unknown field {name!r}", param)
    if prompt.get("prompt_token_ids") is not None:
        return prompt["prompt_token_ids"]
    return prompt.get("prompt")


def _check_ids(token_ids: list[Any], param: str) -> list[int]:
    if token_ids and set(map(type, token_ids)) == {int} and min(token_ids) >= 0 and max(token_ids) < 2**31:
        return token_ids
    for token_id in token_ids:
        if type(token_id) is not int or not 0 <= token_id < 2**31:
            raise InvalidParameter(f"{param} holds {token_id!r:.80}, which is no token id", param)
    return token_ids


@dataclass(frozen=True)
class Truncation:
    """Keep at most ``tokens`` of a prompt, those at its end if ``side`` is "left"; -1 keeps what leaves room for the output."""

    tokens: int
    side: str = "left"

    def __post_init__(self) -> None:
        if self.tokens != -1 and self.tokens < 1:
            raise InvalidParameter(
                f"truncate_prompt_tokens must be at least 1, or -1 for as many as fit, but is {self.tokens}",
                "truncate_prompt_tokens",
            )

    def apply(self, prompt: Prompt, room: int) -> Prompt:
        """``room``: tokens a prompt may have at most."""
        most = room if self.tokens == -1 else self.tokens
        ids = prompt.token_ids
        if len(ids) <= most:
            return prompt
        return Prompt(None, ids[-most:] if self.side == "left" else ids[:most])


def encode_bad_words(tokenizer: Tokenizer, words: tuple[str, ...]) -> list[list[int]]:
    """Each word as the tokenizer writes it at the start of a text and behind a space."""
    spellings = [tokenizer.encode(lead + word.lstrip(" "), False) for word in words for lead in ("", " ")]
    return [list(ids) for ids in dict.fromkeys(tuple(ids) for ids in spellings if ids)]


def fit_params(params: SamplingParams, prompt_tokens: int, max_model_len: int, param: str) -> SamplingParams:
    """``params`` with ``max_tokens`` settled: all that is left of the context if None.

    Raises ``ContextLengthExceeded`` (with ``param``) if prompt and ``max_tokens`` together do not fit.
    """
    wanted = params.max_tokens if params.max_tokens is not None else max(max_model_len - prompt_tokens, 1)
    if prompt_tokens + wanted > max_model_len:
        raise too_long(prompt_tokens, wanted, max_model_len, param)
    return params if params.max_tokens == wanted else msgspec.structs.replace(params, max_tokens=wanted)


def too_long(
    prompt_tokens: int, wanted: int, limit: int, param: str, *, at_least: bool = False
) -> ContextLengthExceeded:
    error = ContextLengthExceeded(prompt_tokens, wanted, limit, at_least=at_least)
    error.param = param
    return error


def split_params(params: SamplingParams) -> list[SamplingParams]:
    """One set per sequence: n sequences are n requests. A seed gives each its own, so that they differ but repeat."""
    if params.n == 1:
        return [params]
    seeds = [None if params.seed is None else (params.seed + i) & (2**63 - 1) for i in range(params.n)]
    return [msgspec.structs.replace(params, n=1, seed=seed) for seed in seeds]
