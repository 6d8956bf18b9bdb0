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
    tokenizer: Tokenizer, prompt: object, vocab_size: int, *, add_special_tokens: bool = True, param: str = "prompt"
) -> Prompt:
    """Read a text, a list of token ids, {"prompt": text} or {"prompt_token_ids": [...]}.

    Raises ``InvalidParameter`` for anything else, an empty prompt, text that is not valid Unicode, or an id outside
    the vocabulary (``vocab_size`` ids).
    """
    if isinstance(prompt, dict):
        prompt = _unwrap(prompt, param)
    if isinstance(prompt, str):
        try:
            prompt.encode()
        except UnicodeEncodeError as error:
            raise InvalidParameter(
                f"{param} is not valid Unicode: lone surrogate at character {error.start}", param
            ) from error
        encoded = Prompt(prompt, tokenizer.encode(prompt, add_special_tokens))
    elif isinstance(prompt, list | tuple):
        encoded = Prompt(None, _check_ids(list(prompt), vocab_size, param))
    else:
        raise InvalidParameter(f"{param} must be a text or a list of token ids, but is {prompt!r:.80}", param)
    if not encoded.token_ids:
        raise InvalidParameter(f"{param} is empty: give at least one token", param)
    return encoded


def _unwrap(prompt: dict[str, Any], param: str) -> object:
    for name in prompt:
        if name not in ("prompt", "prompt_token_ids"):
            raise InvalidParameter(f"{param} has an unknown field {name!r}", param)
    if prompt.get("prompt_token_ids") is not None:
        return prompt["prompt_token_ids"]
    return prompt.get("prompt")


def _check_ids(token_ids: list[Any], vocab_size: int, param: str) -> list[int]:
    for token_id in token_ids:
        if type(token_id) is not int or not 0 <= token_id < vocab_size:
            raise InvalidParameter(
                f"{param} holds {token_id!r:.80}; token ids are whole numbers from 0 to {vocab_size - 1}", param
            )
    return token_ids


def fit_params(params: SamplingParams, prompt_tokens: int, max_model_len: int, vocab_size: int) -> SamplingParams:
    """``params`` with ``max_tokens`` settled. Raises ``ContextLengthExceeded`` if prompt and answer cannot fit."""
    room = max_model_len - prompt_tokens
    wanted = params.max_tokens if params.max_tokens is not None else max(room, 1)
    if room < wanted:
        raise ContextLengthExceeded(prompt_tokens, wanted, max_model_len)
    for token_id in (*params.stop_token_ids, *params.logit_bias):
        if not 0 <= token_id < vocab_size:
            name = "logit_bias" if token_id in params.logit_bias else "stop_token_ids"
            raise InvalidParameter(f"{name} has token id {token_id}, outside 0 to {vocab_size - 1}", name)
    if params.max_tokens == wanted:
        return params
    return msgspec.structs.replace(params, max_tokens=wanted)


def split_params(params: SamplingParams) -> list[SamplingParams]:
    """One set per sequence: n sequences are n requests. A seed gives each its own, so that they differ but repeat."""
    if params.n == 1:
        return [params]
    seeds = [None if params.seed is None else (params.seed + i) & (2**63 - 1) for i in range(params.n)]
    return [msgspec.structs.replace(params, n=1, seed=seed) for seed in seeds]
