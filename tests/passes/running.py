"""Runs modules in the reference interpreter, with random weights that follow the recipes, to hold rewrites to account."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from compilerllm.ir.graph import Module
from compilerllm.ir.recipe import (
    Concat,
    Convert,
    Literal,
    Permute,
    Read,
    Recipe,
    Relayout,
    Reshape,
    Shift,
    Slice,
    reads,
)
from compilerllm.ir.step import StepInputs
from compilerllm.ir.types import QUANTIZED_BLOCKS, TensorType
from compilerllm.kernels.launch.dtypes import TORCH_DTYPES
from compilerllm.kernels.reference.collective import Collective
from compilerllm.kernels.reference.interpreter import Interpreter
from compilerllm.kernels.reference.states import allocate_states, state_groups


def checkpoint(module: Module, seed: int = 0) -> dict[str, Tensor]:
    """A random tensor for every one that the module reads as it is (a captured module reads whole tensors)."""
    generator = torch.Generator().manual_seed(seed)
    found: dict[str, Tensor] = {}
    for instance in module.param_instances():
        if isinstance(instance.recipe, Read) and instance.recipe.name not in found:
            found[instance.recipe.name] = random_tensor(instance.type, generator)
    missing = {n for i in module.param_instances() for n in reads(i.recipe)} - found.keys()
    assert not missing, f"no parameter reads {missing} whole"
    return found


def random_tensor(type: TensorType, generator: torch.Generator) -> Tensor:
    """Small numbers, so that sums stay in range; packed types as bytes [..., blocks, bytes of one]."""
    shape = tuple(int(d) for d in type.shape)
    if type.is_quantized:
        size, weights = QUANTIZED_BLOCKS[type.dtype]
        data = torch.randint(
            0, 256, (*shape[:-1], shape[-1] // weights, size), generator=generator, dtype=torch.uint8
        )
        for at in range(0, 4 if type.dtype == "q4_1" else 2, 2):  # scale (and minimum) of each block, f16
            small = torch.full(data.shape[:-1], 0.02 if at == 0 else -0.15, dtype=torch.float16)
            data[..., at : at + 2] = small.view(torch.uint8).reshape(*data.shape[:-1], 2)
        return data
    values = torch.randn(shape, generator=generator) * (0.5 if len(shape) < 2 else shape[-1] ** -0.5)
    return values.to(TORCH_DTYPES[type.dtype])


def evaluate(recipe: Recipe, tensors: Mapping[str, Tensor]) -> Tensor:
    """A recipe carried out on whole tensors."""
    match recipe:
        case Read(name=name):
            return tensors[name]
        case Literal(dtype=dtype, shape=shape, values=values):
            return torch.tensor(values, dtype=torch.float64).reshape(shape).to(TORCH_DTYPES[dtype])
        case Convert(source=s, dtype=dtype):
            return evaluate(s, tensors).to(TORCH_DTYPES[dtype])
        case Slice(source=s, axis=axis, start=start, stop=stop):
            whole = evaluate(s, tensors)
            per = 32 if whole.dtype == torch.uint8 and axis == whole.dim() - 2 else 1  # weights a block
            return whole.narrow(axis, start // per, (stop - start) // per).contiguous()
        case Concat(sources=parts, axis=axis):
            return torch.cat([evaluate(p, tensors) for p in parts], axis)
        case Permute(source=s, order=order):
            return evaluate(s, tensors).permute(order).contiguous()
        case Reshape(source=s, shape=shape):
            return evaluate(s, tensors).reshape(shape)
        case Shift(source=s):
            raise NotImplementedError(f"no test shifts {s}")
        case Relayout():
            raise NotImplementedError("the reference takes logical layouts")


def bind(module: Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Every parameter of a module, made from a checkpoint."""
    return {i.name: evaluate(i.recipe, tensors) for i in module.param_instances()}


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
