"""The seam for speculative decoding: who guesses, and how guesses are judged."""

from collections.abc import Sequence as Tokens
from typing import Protocol


class Drafter(Protocol):
    """Guesses the tokens that follow. A step then verifies several tokens of a sequence at once."""

    def propose(self, tokens: Tokens[int], most: int) -> list[int]:
        """Up to ``most`` tokens that may follow ``tokens`` (prompt and output); none is a good answer too."""
        ...


def count_accepted(drafts: list[int], sampled: list[int]) -> int:
    """How many drafts the model agrees with: ``sampled[i]`` is its own choice where ``drafts[i]`` stands.

    Tokens [0, n] of ``sampled`` are then valid output, since each was sampled after an accepted prefix. For random
    sampling this holds as well: the draw at a position does not depend on whether the token was guessed.
    """
    accepted = 0
    while accepted < len(drafts) and drafts[accepted] == sampled[accepted]:
        accepted += 1
    return accepted
