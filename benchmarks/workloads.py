"""The CPU serving workloads: prompts as token ids with fixed seeds, so that every system computes the same."""

import random
from dataclasses import dataclass


@dataclass(frozen=True)
class Decode:
    """``batch`` prompts of ``prompt`` tokens; ``output`` tokens each, greedy, no early stop."""

    batch: int
    prompt: int = 128
    output: int = 128

    @property
    def name(self) -> str:
        return f"decode batch {self.batch}"


@dataclass(frozen=True)
class Prefill:
    """One prompt of ``prompt`` tokens, one output token."""

    prompt: int = 1900

    @property
    def name(self) -> str:
        return f"prefill {self.prompt}"


WORKLOADS: tuple[Decode | Prefill, ...] = (Decode(1), Decode(8), Decode(32), Prefill())
VOCABULARY = 49_000  # of SmolLM2, special tokens left out


def prompts(count: int, length: int, seed: int) -> list[list[int]]:
    """``count`` prompts of ``length`` token ids."""
    source = random.Random(seed)
    return [[source.randrange(100, VOCABULARY) for _ in range(length)] for _ in range(count)]
