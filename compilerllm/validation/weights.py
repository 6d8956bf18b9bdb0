"""Made-up checkpoints: random tensors for whatever a module's recipes read, and recipes carried out on them.

Both sides of a rewrite read one checkpoint, so that weights which a pass packs, slices or permutes stay the same weights.
"""

from collections.abc import Mapping

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
from compilerllm.ir.types import QUANTIZED_BLOCKS, TensorType
from compilerllm.kernels.launch.dtypes import TORCH_DTYPES
from compilerllm.validation.errors import CannotValidate


def random_tensor(type: TensorType, generator: torch.Generator, factor: float = 1.0) -> Tensor:
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
    if not type.is_float:
        return torch.randint(0, 2 if type.dtype == "bool" else 4, shape, generator=generator).to(
            TORCH_DTYPES[type.dtype]
        )
    values = torch.randn(shape, generator=generator) * (0.5 if len(shape) < 2 else shape[-1] ** -0.5)
    return (values * factor).to(TORCH_DTYPES[type.dtype])


def checkpoint(module: Module, seed: int = 0, factor: float = 1.0) -> dict[str, Tensor]:
    """A random tensor for every one that the module reads as it is, by the checkpoint's names."""
    generator = torch.Generator().manual_seed(seed)
    found: dict[str, Tensor] = {}
    for instance in module.param_instances():
        if isinstance(instance.recipe, Read) and instance.recipe.name not in found:
            found[instance.recipe.name] = random_tensor(instance.type, generator, factor)
    return found


class Weights:
    """A made-up checkpoint for ``module`` and whatever rewrites make of it.

    A tensor that ``module`` reads whole is a random one. A recipe over tensors that nothing reads whole (a slice of a
    larger one, say) is a random tensor of its own: whoever wraps that recipe gets the same numbers. ``given`` are
    tensors by the checkpoint's names that rewrites add, such as adapters.
    """

    def __init__(
        self, module: Module, seed: int = 0, factor: float = 1.0, given: Mapping[str, Tensor] | None = None
    ) -> None:
        self.tensors = checkpoint(module, seed, factor) | dict(given or {})
        self._whole: dict[Recipe, Tensor] = {}
        generator = torch.Generator().manual_seed(seed + 1)
        for instance in module.param_instances():
            if any(name not in self.tensors for name in reads(instance.recipe)):
                self._whole.setdefault(instance.recipe, random_tensor(instance.type, generator, factor))

    def evaluate(self, recipe: Recipe) -> Tensor:
        """A recipe carried out. Raises ``CannotValidate`` where it reads what the module before did not."""
        return _evaluate(recipe, self.tensors, self._whole)

    def bind(self, module: Module) -> dict[str, Tensor]:
        """Every parameter of a module, by its global name."""
        return {i.name: self.evaluate(i.recipe) for i in module.param_instances()}


def evaluate(recipe: Recipe, tensors: Mapping[str, Tensor]) -> Tensor:
    """A recipe carried out on whole tensors."""
    return _evaluate(recipe, tensors, {})


def bind(module: Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Every parameter of a module, made from a checkpoint."""
    return {i.name: evaluate(i.recipe, tensors) for i in module.param_instances()}


def _evaluate(recipe: Recipe, tensors: Mapping[str, Tensor], whole: Mapping[Recipe, Tensor]) -> Tensor:
    if recipe in whole:
        return whole[recipe]
    match recipe:
        case Read(name=name):
            if name not in tensors:
                raise CannotValidate(f"the rewrite reads {name!r}, which the module before it does not read")
            return tensors[name]
        case Literal(dtype=dtype, shape=shape, values=values):
            return torch.tensor(values, dtype=torch.float64).reshape(shape).to(TORCH_DTYPES[dtype])
        case Convert(source=s, dtype=dtype):
            return _evaluate(s, tensors, whole).to(TORCH_DTYPES[dtype])
        case Shift(source=s, amount=amount):
            value = _evaluate(s, tensors, whole)
            return (value.float() + amount).to(value.dtype)
        case Slice(source=s, axis=axis, start=start, stop=stop):
            value = _evaluate(s, tensors, whole)
            per = 32 if value.dtype == torch.uint8 and axis == value.dim() - 2 else 1  # weights a block
            return value.narrow(axis, start // per, (stop - start) // per).contiguous()
        case Concat(sources=parts, axis=axis):
            return torch.cat([_evaluate(p, tensors, whole) for p in parts], axis)
        case Permute(source=s, order=order):
            value = _evaluate(s, tensors, whole)
            extra = range(len(order), value.dim())  # packed: the bytes of a block stay last
            return value.permute(*order, *extra).contiguous()
        case Reshape(source=s, shape=shape):
            value = _evaluate(s, tensors, whole)
            if (
                value.dtype == torch.uint8 and value.shape[-1] in _BLOCK_BYTES
            ):  # packed: the last axis is kept
                return value.reshape(*shape[:-1], *value.shape[-2:])
            return value.reshape(shape)
        case Relayout(layout=layout):
            raise CannotValidate(f"the reference takes logical layouts, not {layout!r}")


_BLOCK_BYTES = frozenset(size for size, _ in QUANTIZED_BLOCKS.values())
