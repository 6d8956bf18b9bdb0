"""Log-probabilities in the two shapes that OpenAI gives them."""

from typing import Any

from compilerllm.runtime.messages import TokenLogprobs
from compilerllm.text.output import TextDelta
from compilerllm.text.tokenizer import Tokenizer

_FLOOR = -9999.0  # JSON has no -inf; OpenAI's API uses this for what is not among the likely tokens


def chat_logprobs(new: TextDelta, tokenizer: Tokenizer, top: int) -> dict[str, Any] | None:
    """{"content": [{token, logprob, bytes, top_logprobs}]} for the tokens of one delta; ``top`` alternatives each."""
    if new.logprobs is None:
        return None
    content = []
    for token_id, at in zip(new.token_ids, new.logprobs, strict=True):
        entry = _chat_token(tokenizer, token_id, at.chosen)
        entry["top_logprobs"] = [
            _chat_token(tokenizer, i, value) for i, value in zip(at.top_ids[:top], at.top[:top], strict=True)
        ]
        content.append(entry)
    return {"content": content, "refusal": None}


def _chat_token(tokenizer: Tokenizer, token_id: int, logprob: float) -> dict[str, Any]:
    raw = tokenizer.token_bytes(token_id)
    return {"token": raw.decode(errors="replace"), "logprob": max(logprob, _FLOOR), "bytes": list(raw)}


class CompletionLogprobs:
    """{tokens, token_logprobs, top_logprobs, text_offset}, collected over one sequence; offsets count characters."""

    def __init__(self, tokenizer: Tokenizer, top: int) -> None:
        self._tokenizer, self._top = tokenizer, top
        self._offset = 0

    def add(self, new: TextDelta) -> dict[str, list[Any]] | None:
        """The part of one delta."""
        if new.logprobs is None:
            return None
        part: dict[str, list[Any]] = {
            "tokens": [],
            "token_logprobs": [],
            "top_logprobs": [],
            "text_offset": [],
        }
        for token_id, at in zip(new.token_ids, new.logprobs, strict=True):
            token = self._tokenizer.token_text(token_id)
            part["tokens"].append(token)
            part["token_logprobs"].append(max(at.chosen, _FLOOR))
            part["top_logprobs"].append(self._most_likely(token, at))
            part["text_offset"].append(self._offset)
            self._offset += len(token)
        return part

    def _most_likely(self, token: str, at: TokenLogprobs) -> dict[str, float]:
        """The chosen token is always among them, so there may be one more than asked for."""
        top = zip(at.top_ids[: self._top], at.top[: self._top], strict=True)
        return {
            **{self._tokenizer.token_text(i): max(v, _FLOOR) for i, v in top},
            token: max(at.chosen, _FLOOR),
        }


def join_parts(parts: list[dict[str, list[Any]]]) -> dict[str, list[Any]]:
    """The parts of one sequence as a whole."""
    return {key: [item for part in parts for item in part[key]] for key in parts[0]} if parts else {}
