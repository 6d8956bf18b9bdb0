"""Serve a checkpoint in-process, and drive an executable by hand: what the tests of compiled models share."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from compilerllm.building import build
from compilerllm.compiler import CompileRequest
from compilerllm.ir.step import StepInputs
from compilerllm.loading import load_compiled

BLOCK = 32


def compile_and_load(place: Path, **options: Any) -> Any:
    """Build ``place`` into the cache of this test session and load it; the driver's whole way, but for the child."""
    request = CompileRequest(model=str(place), **{"max_num_seqs": 8, "max_num_batched_tokens": 256} | options)
    return load_compiled(build(request, place), place)


@dataclass(frozen=True)
class Part:
    """Tokens of one sequence in one step."""

    slot: int
    start: int  # position of the first token
    tokens: Sequence[int]
    table: Sequence[int]  # block ids


def make_step(parts: Sequence[Part], groups: int) -> StepInputs:
    """A step in which every row is sampled."""

    def ints(values: Any) -> npt.NDArray[np.int32]:
        return np.ascontiguousarray(np.array(values, np.int32))

    tokens = [t for p in parts for t in p.tokens]
    width = max(len(p.table) for p in parts)
    tables = [[*p.table, *[-1] * (width - len(p.table))] for p in parts]
    return StepInputs(
        token_ids=ints(tokens),
        positions=ints([p.start + i for p in parts for i in range(len(p.tokens))]),
        query_start=ints(np.cumsum([0, *(len(p.tokens) for p in parts)])),
        seq_lens=ints([p.start + len(p.tokens) for p in parts]),
        block_tables=ints([tables] * groups),
        slots=ints([p.slot for p in parts]),
        sample_rows=ints(range(len(tokens))),
        adapter_id=ints([0] * len(tokens)),
    )


def teacher_forced(
    model: Any, sequences: Sequence[Sequence[int]], chunks: Sequence[Sequence[int]]
) -> list[Any]:
    """Logits of every position of every sequence, fed in ``chunks`` (token counts per step and sequence; 0 = sits out)."""
    free = iter([7, 3, 1, 9, 20, 21, 5, 11, 2, 30, 31, 14])  # scattered on purpose
    tables = [[next(free) for _ in range(-(-len(sequence) // BLOCK))] for sequence in sequences]
    at = [0] * len(sequences)
    logits: list[list[Any]] = [[] for _ in sequences]
    for counts in chunks:
        parts = [
            Part(i, at[i], sequences[i][at[i] : at[i] + n], tables[i]) for i, n in enumerate(counts) if n
        ]
        model.forward(make_step(parts, len(model.groups)))
        rows, start = np.array(model.logits()), 0
        assert not np.isnan(rows).any(), "a logit was not written"
        for part in parts:
            logits[part.slot].append(rows[start : start + len(part.tokens)])
            start += len(part.tokens)
            at[part.slot] += len(part.tokens)
    return [np.concatenate(parts) for parts in logits]
