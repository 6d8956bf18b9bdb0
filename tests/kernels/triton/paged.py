"""Steps over a paged cache for tests of attention: the same content as the reference's states and as the GPU's blocks."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from compilerllm.ir.step import StepInputs
from compilerllm.ir.types import StateType
from compilerllm.kernels.reference.states import State, Step
from tests.kernels.triton.harness import BLOCK, TORCH, device

NAN = float("nan")


@dataclass(frozen=True, eq=False)
class Paged:
    """A step of ``lengths`` (context before, tokens now), padded; ``cache`` [blocks, 2, HK, 32, D] with guards.

    Tokens that no query may see, and freed blocks, are NaN in the cache.
    """

    step: Step
    state: State
    cache: Tensor
    fields: dict[str, Tensor]
    tokens: int
    blocks: int

    def content(self) -> Tensor:
        """The cache in the reference's layout [blocks, 32, 2, HK, D]; asserts that the guard blocks are unchanged."""
        data = self.cache.cpu()
        assert bool((data[self.blocks :] == 77).all()), "behind the cache was written"
        return data[: self.blocks].permute(0, 3, 1, 2, 4)


def make_paged(
    lengths: Sequence[tuple[int, int]], heads: int, dim: int, dtype: str = "bf16", *, window: int = 0,
    pad_sequences: int = 0, pad_tokens: int = 0, seed: int = 0, written: bool = True,
) -> Paged:  # fmt: skip
    """``written``: this step's own keys and values are in the cache already; otherwise theirs is NaN too."""
    generator = torch.Generator().manual_seed(seed)
    blocks_each = max(1, max(-(-(a + b) // BLOCK) for a, b in lengths))
    sequences, columns = len(lengths), blocks_each + 1
    total = sequences * blocks_each + 1  # block 0 belongs to nobody
    order = torch.randperm(total - 1, generator=generator) + 1
    tables = np.full((1, sequences, columns), -1, np.int32)
    data = torch.full((total, BLOCK, 2, heads, dim), NAN, dtype=TORCH[dtype])
    for s, (before, now) in enumerate(lengths):
        first = max(0, before - window + 1) if window else 0
        for b in range(-(-(before + now) // BLOCK)):
            if (b + 1) * BLOCK <= first:
                continue  # freed
            block = int(order[s * blocks_each + b])
            tables[0, s, b] = block
            for row in range(BLOCK):
                if first <= b * BLOCK + row < (before + now if written else before):
                    data[block, row] = torch.randn(2, heads, dim, generator=generator).to(TORCH[dtype])
    start = np.cumsum([0, *(n for _, n in lengths)]).astype(np.int32)
    positions = np.array([p for a, n in lengths for p in range(a, a + n)], np.int32)
    lens = np.array([a + n for a, n in lengths], np.int32)
    inputs = StepInputs(
        token_ids=positions, positions=positions, query_start=start, seq_lens=lens, block_tables=tables,
        slots=np.arange(sequences, dtype=np.int32), sample_rows=np.zeros(1, np.int32), adapter_id=positions * 0,
    )  # fmt: skip
    tokens = int(start[-1])
    padded = {
        "positions": np.pad(positions, (0, pad_tokens)),
        "query_start": np.pad(start, (0, pad_sequences), constant_values=tokens),
        "seq_lens": np.pad(lens, (0, pad_sequences)),
        "table": np.pad(tables[0], ((0, pad_sequences), (0, 0)), constant_values=-1),
        "meta": np.array([tokens, sequences, 1, columns], np.int32),
    }
    fields = {name: torch.from_numpy(a.astype(np.int32)).to(device()) for name, a in padded.items()}
    guard = torch.full((1, 2, heads, BLOCK, dim), 77, dtype=data.dtype)
    cache = torch.cat((data.permute(0, 2, 3, 1, 4), guard)).contiguous().to(device())
    kind = StateType("paged_kv", dtype, (("heads", heads), ("dim", dim)))
    return Paged(Step(inputs), State(kind, data, 0), cache, fields, tokens, total)


def widened(paged: Paged) -> State:
    """The reference's state in f32."""
    return State(paged.state.type, paged.state.data.float(), 0)
