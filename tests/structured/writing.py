"""A writer without a model: it picks among the tokens that a grammar allows, and ends as soon as it may."""

import random
from typing import Any

import numpy as np

from compilerllm.structured.backend import Backend, Compiled
from compilerllm.structured.vocabulary import Vocabulary
from compilerllm.text.tokenizer import Tokenizer
from tests.text.tiny_tokenizers import byte_level, save_tokenizer


def tokens_of(row: Any) -> list[int]:
    found: list[int] = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist()
    return found


def write(
    compiled: Compiled, vocabulary: Vocabulary, generator: random.Random, most: int = 3000
) -> bytes | None:
    """What comes out; None if it has no end within ``most`` tokens. Ever more it prefers what closes to what opens."""
    matcher, text = compiled.matcher(), b""
    row = np.zeros(-(-len(vocabulary.pieces) // 32), np.uint32)
    for step in range(most):
        matcher.fill(row)
        allowed = [t for t in tokens_of(row) if t < len(vocabulary.pieces)]
        assert allowed, f"nothing may follow {text!r}"
        ends = [t for t in allowed if t in vocabulary.eos]
        if ends and (len(allowed) == len(ends) or step > 20 or generator.random() < 0.5):
            assert matcher.accept(ends[0]) and matcher.ended
            return text
        closing = [t for t in allowed if vocabulary.pieces[t] in (b'"', b"}", b"]", b",", b":")]
        plain = [t for t in allowed if t not in vocabulary.eos and vocabulary.pieces[t].strip()]
        chosen = generator.choice(
            closing if closing and generator.random() < 0.1 + step / 60 else plain or allowed
        )
        assert matcher.accept(chosen), f"{vocabulary.pieces[chosen]!r} was allowed behind {text!r}"
        text += vocabulary.pieces[chosen]
    return None


def takes(compiled: Compiled, tokenizer: Tokenizer, text: str) -> bool:
    """Whether a text is an output, token by token as the tokenizer writes it."""
    matcher = compiled.matcher()
    row = np.zeros(-(-tokenizer.vocab_size // 32), np.uint32)
    for token in tokenizer.encode(text, False):
        matcher.fill(row)
        fits = int(row[token // 32]) >> token % 32 & 1
        assert matcher.accept(token) == bool(fits), f"mask and acceptance differ at {token} in {text!r}"
        if not fits:
            return False
    return matcher.whole


def make_tokenizer(folder: Any) -> tuple[Tokenizer, Vocabulary]:
    tokenizer = save_tokenizer(byte_level(), folder)
    return tokenizer, Vocabulary.of(tokenizer, tokenizer.vocab_size + 13)


class Kit:
    """A tokenizer and both libraries over it. No dataclass: hypothesis would print all of it."""

    def __init__(self, tokenizer: Tokenizer, vocabulary: Vocabulary, backends: dict[str, Backend]) -> None:
        self.tokenizer, self.vocabulary, self.backends = tokenizer, vocabulary, backends

    def __repr__(self) -> str:
        return "kit"
