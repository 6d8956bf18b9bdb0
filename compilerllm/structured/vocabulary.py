"""The tokens of a model as grammar libraries need them: the bytes that each stands for."""

from dataclasses import dataclass
from pathlib import Path

from compilerllm.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Vocabulary:
    """``pieces``: bytes of each token id; empty for special tokens and for ids that no token has, which no text is made of.

    ``eos``: ids that end a text. ``file``: the tokenizer.json.
    """

    pieces: list[bytes]
    eos: tuple[int, ...]
    file: Path

    @staticmethod
    def of(tokenizer: Tokenizer, size: int) -> "Vocabulary":
        """``size``: logits of a row, which may be more than the tokenizer has tokens."""
        known = min(size, tokenizer.vocab_size)
        silent = tokenizer.special_ids | set(tokenizer.eos_token_ids)
        pieces = [b"" if i in silent else tokenizer.token_bytes(i) for i in range(known)]
        return Vocabulary(
            pieces + [b""] * (size - known),
            tuple(i for i in tokenizer.eos_token_ids if i < size),
            tokenizer.folder / "tokenizer.json",
        )
