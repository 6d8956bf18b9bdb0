"""What both sides compute: sequences, cut into steps with prompts, mixed steps and decodes, every token's row sampled."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from compilerllm.bisect.errors import BadPrompt
from compilerllm.ir.step import StepInputs

BLOCK = 32  # tokens
SHORTEST, LONGEST = 8, 256  # tokens of a prompt that are compared
DECODES = 4  # steps of one token a sequence, at the end
# Real text of some sixty tokens, so that no prompt need be given.
TEXT = (
    "The lighthouse keeper wrote every evening in his journal: the wind, the ships that passed, the price of oil. "
    "In 1887 he counted 412 sails. Nobody read it until the summer when the new road was built, and then"
)


@dataclass(frozen=True)
class Workload:
    """Sequences of token ids, and for each step how many tokens of each sequence it takes in."""

    sequences: tuple[tuple[int, ...], ...]
    chunks: tuple[tuple[int, ...], ...]

    @staticmethod
    def of(tokens: Sequence[int], vocab: int, max_len: int, max_tokens: int = 4 * LONGEST) -> "Workload":
        """Two sequences made of a prompt. The first is all of it, the second begins in its middle.

        The first's prompt comes in two chunks; beside the second of them the other sequence decodes already. Then both
        decode. Raises ``BadPrompt``.
        """
        if len(tokens) < SHORTEST:
            raise BadPrompt(
                f"The prompt has {len(tokens)} tokens; comparing needs at least {SHORTEST}. Give a longer one, "
                "or leave it out for a text of ours.",
                "prompt",
            )
        for token in tokens:
            if not 0 <= token < vocab:
                raise BadPrompt(
                    f"Token id {token} is outside the model's vocabulary of {vocab:,}.", "token_ids"
                )
        limit = min(LONGEST, max_len, max_tokens)
        if len(tokens) > limit:
            raise BadPrompt(
                f"The prompt has {len(tokens)} tokens; at most {limit} are compared. Give a part of it.",
                "prompt",
            )
        first = tuple(tokens)
        decodes = min(DECODES, len(first) // 4)
        second = first[len(first) // 3 :]
        prompt = len(first) - decodes
        head = (prompt + 1) // 2
        start = len(second) - decodes - 1
        steps = [(head, start), (prompt - head, 1), *[(1, 1)] * decodes]
        return Workload((first, second), tuple(steps))

    @property
    def num_blocks(self) -> int:
        """KV blocks that the sequences take, and some that nobody owns."""
        return sum(-(-len(s) // BLOCK) for s in self.sequences) + 3

    def steps(self, groups: int) -> list[StepInputs]:
        """The steps, for a model with so many groups of paged states. Blocks are handed out scattered."""
        free = list(range(self.num_blocks))[::-1]
        free = free[::2] + free[1::2]
        tables = [[free.pop() for _ in range(-(-len(s) // BLOCK))] for s in self.sequences]
        width = max(map(len, tables))
        table = np.full((groups, len(tables), width), -1, np.int32)
        for row, blocks in enumerate(tables):
            table[:, row, : len(blocks)] = blocks
        done = [0] * len(self.sequences)
        result = []
        for counts in self.chunks:
            spans = [(at, at + n) for at, n in zip(done, counts, strict=True)]
            done = [end for _, end in spans]
            total = sum(counts)
            result.append(
                StepInputs(
                    token_ids=_ints(
                        [t for s, (a, b) in zip(self.sequences, spans, strict=True) for t in s[a:b]]
                    ),
                    positions=_ints([p for a, b in spans for p in range(a, b)]),
                    query_start=_ints(np.cumsum([0, *counts])),
                    seq_lens=_ints(done),
                    block_tables=table.copy(),
                    slots=_ints(range(len(counts))),
                    sample_rows=_ints(range(total)),
                    adapter_id=_ints([0] * total),
                )
            )
        return result

    def by_step(self, logits: Sequence[Tensor]) -> list[Tensor]:
        """Logits of whole sequences [tokens, V] as a step's rows, in the order of the steps."""
        done = [0] * len(self.sequences)
        result = []
        for counts in self.chunks:
            parts = [rows[a : a + n] for rows, a, n in zip(logits, done, counts, strict=True)]
            done = [a + n for a, n in zip(done, counts, strict=True)]
            result.append(torch.cat(parts))
        return result

    def describe(self, index: int) -> str:
        """A step in words."""
        counts = self.chunks[index]
        if max(counts) == 1:
            return f"decode of {len(counts)} sequences"
        if min(counts) == 1:
            return f"{max(counts)} tokens of a prompt beside a decode"
        return f"prompts of {' and '.join(map(str, counts))} tokens"


def _ints(values: object) -> "np.typing.NDArray[np.int32]":
    return np.ascontiguousarray(np.array(values, np.int32))
