"""References of plain tensor ops: pointwise, reductions, shapes, indexing."""

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from compilerllm.kernels.launch.dtypes import TORCH_DTYPES
from compilerllm.kernels.reference.registry import reference

Scalar = bool | int | float


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


_UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    "neg": torch.neg, "abs": torch.abs, "exp": torch.exp, "log": torch.log, "sqrt": torch.sqrt, "rsqrt": torch.rsqrt,
    "reciprocal": torch.reciprocal, "tanh": torch.tanh, "sigmoid": torch.sigmoid, "silu": F.silu, "relu": F.relu,
    "gelu": F.gelu, "gelu_tanh": _gelu_tanh, "sin": torch.sin, "cos": torch.cos, "erf": torch.erf,
    "floor": torch.floor, "log1p": torch.log1p, "square": torch.square, "logical_not": torch.logical_not,
}  # fmt: skip


def _pairwise(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Any, Any], Tensor]:
    """For ops that torch offers between tensors only: a number becomes a rank-0 tensor, which does not widen."""

    def apply(a: Any, b: Any) -> Tensor:
        return function(torch.as_tensor(a), torch.as_tensor(b))

    return apply


_BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "div": _pairwise(torch.true_divide), "pow": operator.pow,
    "remainder": operator.mod, "floor_div": operator.floordiv, "maximum": _pairwise(torch.maximum),
    "minimum": _pairwise(torch.minimum), "logical_and": _pairwise(torch.logical_and),
    "logical_or": _pairwise(torch.logical_or), "eq": operator.eq, "ne": operator.ne, "lt": operator.lt,
    "le": operator.le, "gt": operator.gt, "ge": operator.ge,
}  # fmt: skip


def _register_pointwise() -> None:
    def unary(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        return lambda x: function(x)

    def binary(function: Callable[[Any, Any], Any]) -> Callable[..., Tensor]:
        def apply(
            a: Tensor, b: Tensor | None = None, *, scalar: Scalar | None = None, reverse: bool = False
        ) -> Tensor:
            right = scalar if b is None else b
            result: Tensor = function(right, a) if reverse else function(a, right)
            return result

        return apply

    for name, function in _UNARY.items():
        reference(name)(unary(function))
    for name, pair in _BINARY.items():
        reference(name)(binary(pair))


_register_pointwise()


@reference("where")
def where(condition: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return torch.where(condition, a, b)


@reference("cast")
def cast(x: Tensor, *, dtype: str) -> Tensor:
    return x.to(TORCH_DTYPES[dtype])


# sum, prod and cumsum say their dtype, because torch would widen whole numbers to i64.
@reference("sum")
def sum_(x: Tensor, *, axis: int, keepdim: bool = False) -> Tensor:
    return x.sum(axis, keepdim, dtype=x.dtype)


@reference("mean")
def mean(x: Tensor, *, axis: int, keepdim: bool = False) -> Tensor:
    return x.mean(axis, keepdim)


@reference("amax")
def amax(x: Tensor, *, axis: int, keepdim: bool = False) -> Tensor:
    return x.amax(axis, keepdim)


@reference("amin")
def amin(x: Tensor, *, axis: int, keepdim: bool = False) -> Tensor:
    return x.amin(axis, keepdim)


@reference("argmax")
def argmax(x: Tensor, *, axis: int, keepdim: bool = False) -> Tensor:
    return x.argmax(axis, keepdim)


@reference("prod")
def prod(x: Tensor, *, axis: int, keepdim: bool = False) -> Tensor:
    return x.prod(axis, keepdim, dtype=x.dtype)


@reference("softmax")
def softmax(x: Tensor, *, axis: int) -> Tensor:
    return x.softmax(axis, dtype=torch.float32).to(x.dtype) if x.dtype != torch.float64 else x.softmax(axis)


@reference("cumsum")
def cumsum(x: Tensor, *, axis: int) -> Tensor:
    return x.cumsum(axis, dtype=x.dtype)


@reference("reshape")
def reshape(x: Tensor, *, shape: Sequence[int]) -> Tensor:
    return x.reshape(tuple(shape))


@reference("permute")
def permute(x: Tensor, *, order: Sequence[int]) -> Tensor:
    return x.permute(tuple(order))


@reference("expand")
def expand(x: Tensor, *, shape: Sequence[int]) -> Tensor:
    return x.expand(tuple(shape))


@reference("slice")
def slice_(x: Tensor, *, axis: int, start: int, stop: int, step: int = 1) -> Tensor:
    index = [slice(None)] * x.dim()
    index[axis] = slice(start, stop, step)
    return x[tuple(index)]


@reference("concat")
def concat(*parts: Tensor, axis: int) -> Tensor:
    return torch.cat(parts, axis)


@reference("full")
def full(*, shape: Sequence[int], value: Scalar, dtype: str) -> Tensor:
    return torch.full(tuple(shape), value, dtype=TORCH_DTYPES[dtype])


@reference("iota")
def iota(*, size: int, dtype: str = "i64") -> Tensor:
    return torch.arange(size, dtype=TORCH_DTYPES[dtype])


@reference("gather_rows")
def gather_rows(x: Tensor, rows: Tensor) -> Tensor:
    return x.index_select(0, rows)


@reference("matmul")
def matmul(a: Tensor, b: Tensor) -> Tensor:
    return torch.matmul(a, b)
