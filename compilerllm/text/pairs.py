"""One text or two as a model that pools sees them: with special tokens around, the second known by its token types."""

from dataclasses import dataclass

from compilerllm.errors import InvalidParameter
from compilerllm.text.prompts import check_unicode, too_long
from compilerllm.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Cut:
    """How many tokens are kept: of both texts with their special tokens, and of each alone; None keeps all.

    side: where what is left over is dropped.
    """

    whole: int | None = None
    first: int | None = None
    second: int | None = None
    side: str = "right"


@dataclass(frozen=True)
class Tokens:
    """An input for the engine. ``second``: where the tokens of the second type begin, if there are any."""

    ids: list[int]
    second: int | None = None

    def checked(self, limit: int, param: str) -> "Tokens":
        """Itself. Raises ``ContextLengthExceeded`` with ``param`` where it is longer than ``limit``."""
        if len(self.ids) > limit:
            raise too_long(len(self.ids), 0, limit, param)
        return self


def encode_texts(
    tokenizer: Tokenizer,
    first: str,
    second: str | None,
    params: tuple[str, str],
    add_special_tokens: bool,
    cut: Cut,
    limit: int,
) -> Tokens:
    """Encode and cut, as transformers' "longest_first": from the longer text, then from both.

    ``params``: how errors call the texts. ``limit``: tokens that the model takes; a text that is surely longer, and is not
    to be cut, is not encoded. Raises ``InvalidParameter`` and ``ContextLengthExceeded``.
    """
    texts, kept = [first] if second is None else [first, second], (cut.first, cut.second)
    for text, param, most in zip(texts, params, kept, strict=False):
        _check(tokenizer, text, param, None if cut.whole or most else limit)
    encoded = [tokenizer.encode_text(text) for text in texts]
    for one, most in zip(encoded, kept, strict=False):
        if most is not None:
            one.truncate(most, direction=cut.side)
    if cut.whole is not None:
        room = cut.whole - tokenizer.num_special_tokens(second is not None) * add_special_tokens
        if room < len(texts):
            raise InvalidParameter(
                f"truncate_prompt_tokens is {cut.whole}: that leaves no room for the text beside special tokens",
                "truncate_prompt_tokens",
            )
        for one, most in zip(encoded, _shares([len(e.ids) for e in encoded], room), strict=True):
            one.truncate(most, direction=cut.side)
    ids, types = tokenizer.join(encoded, add_special_tokens)
    if not ids:
        raise InvalidParameter(f"{params[0]} is empty: give at least one token", params[0])
    return Tokens(ids, types.index(1) if 1 in types else None)


def _check(tokenizer: Tokenizer, text: str, param: str, limit: int | None) -> None:
    check_unicode(text, param)
    least = tokenizer.fewest_tokens(text)
    if limit is not None and least > limit:
        raise too_long(least, 0, limit, param, at_least=True)


def _shares(lengths: list[int], room: int) -> list[int]:
    """How much of each text stays. Of two that do not fit the shorter stays whole if that is at most half."""
    if sum(lengths) <= room:
        return lengths
    if len(lengths) == 1:
        return [room]
    first, second = lengths
    short = min(first, second, room // 2)
    return [room - short, short] if first > second else [short, room - short]
