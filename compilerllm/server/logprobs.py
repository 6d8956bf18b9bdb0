"""Log-probabilities in the two shapes that OpenAI gives them."""

from typing import Any

from compilerllm.runtime.messages import TokenLogprobs
from compilerllm.text.output import TextDelta
from compilerllm.text.tokenizer import Tokenizer

_FLOOR = -9999.0  # JSON has no -inf; OpenAI's API uses this for what is not among the likely tokens


class TokenNames:
    """How tokens are called in a response: by their text, or as "token_id:7" where a request wants that."""

    def __init__(self, tokenizer: Tokenizer, as_ids: bool = False) -> None:
        self._tokenizer, self._as_ids = tokenizer, as_ids

    def bytes_of(self, token_id: int) -> bytes:
        return self._tokenizer.token_bytes(token_id)

    def of(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self._as_ids else self._tokenizer.token_text(token_id)


def prompt_logprobs(
    token_ids: list[int], scores: list[TokenLogprobs], names: TokenNames
) -> list[dict[str, dict[str, Any]] | None]:
    """vLLM's shape: for each token of the prompt {token id: {logprob, rank, decoded_token}}, nothing for the first."""
    result: list[dict[str, dict[str, Any]] | None] = [None]
    for token, at in zip(token_ids[1:], scores, strict=True):
        ranked = {i: (value, rank) for rank, (i, value) in enumerate(zip(at.top_ids, at.top, strict=True), 1)}
        ranked[token] = (at.chosen, at.rank)
        result.append(
            {
                str(i): {"logprob": max(value, _FLOOR), "rank": rank, "decoded_token": names.of(i)}
                for i, (value, rank) in ranked.items()
            }
        )
    return result


def chat_logprobs(new: TextDelta, names: TokenNames, top: int) -> dict[str, Any] | None:
    """{"content": [{token, logprob, bytes, top_logprobs}]} for the tokens of one delta; ``top`` alternatives each."""
    if new.logprobs is None:
        return None
    content = []
    for token_id, at in zip(new.token_ids, new.logprobs, strict=True):
        entry = _chat_token(names, token_id, at.chosen)
        entry["top_logprobs"] = [
            _chat_token(names, i, value) for i, value in zip(at.top_ids[:top], at.top[:top], strict=True)
        ]
        content.append(entry)
    return {"content": content, "refusal": None}


def _chat_token(names: TokenNames, token_id: int, logprob: float) -> dict[str, Any]:
    raw = names.bytes_of(token_id)
    return {"token": names.of(token_id), "logprob": max(logprob, _FLOOR), "bytes": list(raw)}


class CompletionLogprobs:
    """{tokens, token_logprobs, top_logprobs, text_offset}, collected over one sequence; offsets count characters."""

    def __init__(self, names: TokenNames, top: int) -> None:
        self._names, self._top = names, top
        self._offset = 0

    def prompt(self, token_ids: list[int], scores: list[TokenLogprobs]) -> dict[str, list[Any]]:
        """The part of an echoed prompt, whose first token has no probability."""
        text = self._names.of(token_ids[0])
        part: dict[str, list[Any]] = {
            "tokens": [text], "token_logprobs": [None], "top_logprobs": [None], "text_offset": [self._offset],
        }  # fmt: skip
        self._offset += len(text)
        rest = self._part(token_ids[1:], scores)
        return {key: part[key] + rest[key] for key in part}

    def add(self, new: TextDelta) -> dict[str, list[Any]] | None:
        """The part of one delta."""
        return None if new.logprobs is None else self._part(new.token_ids, new.logprobs)

    def _part(self, token_ids: list[int], logprobs: list[TokenLogprobs]) -> dict[str, list[Any]]:
        part: dict[str, list[Any]] = {
            "tokens": [],
            "token_logprobs": [],
            "top_logprobs": [],
            "text_offset": [],
        }
        for token_id, at in zip(token_ids, logprobs, strict=True):
            token = self._names.of(token_id)
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
            **{self._names.of(i): max(v, _FLOOR) for i, v in top},
            token: max(at.chosen, _FLOOR),
        }


def join_parts(parts: list[dict[str, list[Any]]]) -> dict[str, list[Any]]:
    """The parts of one sequence as a whole."""
    return {key: [item for part in parts for item in part[key]] for key in parts[0]} if parts else {}
