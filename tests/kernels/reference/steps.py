"""Steps and random arguments for tests of the reference."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from compilerllm.ir.dims import substitute
from compilerllm.ir.graph import Module
from compilerllm.ir.step import StepInputs
from compilerllm.ir.types import StepType, TensorType
from compilerllm.kernels.launch.dtypes import TORCH_DTYPES
from compilerllm.kernels.reference.quantized import quantize


def make_step(
    lengths: Sequence[tuple[int, int]], *, block_size: int = 4, groups: int = 1, rows: Sequence[int] | None = None,
    token_ids: Sequence[int] | None = None, adapters: Sequence[int] | None = None, slots: Sequence[int] | None = None,
    blocks_each: int = 8,
) -> StepInputs:  # fmt: skip
    """A step of sequences given as (context before, tokens now); sequence s owns ``blocks_each`` blocks, reversed."""
    start = np.cumsum([0, *(now for _, now in lengths)])
    positions = [p for before, now in lengths for p in range(before, before + now)]
    tables = [
        [list(range((s + 1) * blocks_each - 1, s * blocks_each - 1, -1)) for s in range(len(lengths))]
    ] * groups
    total = int(start[-1])

    def whole(values: object) -> "np.ndarray[tuple[int, ...], np.dtype[np.int32]]":
        return np.ascontiguousarray(values, dtype=np.int32)

    assert all(before + now <= blocks_each * block_size for before, now in lengths)
    return StepInputs(
        token_ids=whole(range(total) if token_ids is None else token_ids), positions=whole(positions),
        query_start=whole(start), seq_lens=whole([sum(pair) for pair in lengths]), block_tables=whole(tables),
        slots=whole(range(len(lengths)) if slots is None else slots),
        sample_rows=whole(range(total) if rows is None else rows),
        adapter_id=whole([0] * total if adapters is None else adapters),
    )  # fmt: skip


def random_tensor(type: TensorType, dims: dict[str, int]) -> Tensor:
    """Positive floats, small whole numbers, coins; packed types as blocks of random weights."""
    shape = tuple(int(substitute(d, dict(dims))) for d in type.shape)
    if type.is_quantized:
        return quantize(torch.randn(shape), type.dtype)
    dtype = TORCH_DTYPES[type.dtype]
    if dtype.is_floating_point:
        return torch.rand(shape).add(0.1).to(dtype)
    return torch.randint(0, 2, shape).to(dtype)


def random_params(module: Module) -> dict[str, Tensor]:
    return {p.name: random_tensor(p.type, {}) for p in module.param_instances()}


def random_inputs(module: Module, dims: dict[str, int]) -> list[Tensor]:
    """Inputs of ``main`` but the step."""
    return [random_tensor(v.tensor, dims) for v in module.main.inputs if not isinstance(v.type, StepType)]
