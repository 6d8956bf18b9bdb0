"""Runs captured and served modules in the reference interpreter, on weights of a made-up checkpoint."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from compilerllm.ir.graph import Module
from compilerllm.ir.step import StepInputs
from compilerllm.kernels.reference.collective import Collective
from compilerllm.kernels.reference.interpreter import Interpreter
from compilerllm.kernels.reference.states import allocate_states, state_groups
from compilerllm.validation.weights import bind


def run_captured(module: Module, tensors: Mapping[str, Tensor], ids: Sequence[int]) -> Tensor:
    """Logits [T, V] of one sequence."""
    given = torch.tensor([list(ids)])
    (logits,) = Interpreter(module, bind(module, tensors)).run(given, torch.arange(len(ids)).unsqueeze(0))
    return logits[0]


class Served:
    """A served module with its states: sequences are rows of one pool, each with blocks of its own."""

    def __init__(
        self,
        module: Module,
        tensors: Mapping[str, Tensor],
        sequences: int,
        collective: Collective | None = None,
    ) -> None:
        self.interpreter = Interpreter(module, bind(module, tensors), collective=collective)
        self.blocks = 2  # a sequence; 64 tokens
        self.groups = len([g for g in state_groups(module) if g.addressing == "paged"])
        self.states = allocate_states(module, sequences * self.blocks, sequences)
        self.done = [0] * sequences

    def step(self, chunks: Sequence[Sequence[int]], adapters: Sequence[int] | None = None) -> Tensor:
        """Append a chunk of tokens to each sequence and sample every row: logits [T, V]."""
        tables = np.arange(len(self.done) * self.blocks, dtype=np.int32).reshape(
            1, len(self.done), self.blocks
        )
        counts = [len(c) for c in chunks]
        positions = [p for s, n in enumerate(counts) for p in range(self.done[s], self.done[s] + n)]
        self.done = [a + n for a, n in zip(self.done, counts, strict=True)]
        total = sum(counts)
        ids = adapters or [0] * len(chunks)
        inputs = StepInputs(
            token_ids=np.array([t for c in chunks for t in c], np.int32),
            positions=np.array(positions, np.int32),
            query_start=np.cumsum([0, *counts], dtype=np.int32),
            seq_lens=np.array(self.done, np.int32),
            block_tables=np.repeat(tables, self.groups, 0),
            slots=np.arange(len(chunks), dtype=np.int32),
            sample_rows=np.arange(total, dtype=np.int32),
            adapter_id=np.array([a for a, n in zip(ids, counts, strict=True) for _ in range(n)], np.int32),
        )
        return self.interpreter.run_step(inputs, self.states)


SEQUENCES = ([3, 14, 15, 9, 26, 5, 35], [8, 9, 7, 9, 3, 2, 38, 4, 6, 26])


def served_logits(module: Module, tensors: Mapping[str, Tensor]) -> list[Tensor]:
    """Logits of ``SEQUENCES`` run together, in chunks of different sizes, then token by token."""
    served = Served(module, tensors, len(SEQUENCES))
    found: list[list[Tensor]] = [[] for _ in SEQUENCES]
    cuts = ([0, 4, 5, 6, 7], [0, 3, 8, 9, 10])
    for at in range(4):
        chunks = [list(s[c[at] : c[at + 1]]) for s, c in zip(SEQUENCES, cuts, strict=True)]
        rows = served.step(chunks)
        for s, part in enumerate(torch.split(rows, [len(c) for c in chunks])):
            found[s].append(part)
    return [torch.cat(parts) for parts in found]
