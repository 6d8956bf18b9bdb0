"""Torch's dtypes and symbolic sizes as the IR's."""

from collections.abc import Mapping
from typing import Any

import sympy
import torch

from compilerllm.ir.dims import Dim, FloorDiv, dim, symbol
from compilerllm.ir.types import TensorType
from compilerllm.kernels.launch.dtypes import IR_DTYPES
from compilerllm.models.errors import UnsupportedOperator


def dtype_name(dtype: torch.dtype) -> str:
    """Its IR name. Raises ``UnsupportedOperator`` for complex, quantised and 8-bit float types."""
    if dtype not in IR_DTYPES:
        raise UnsupportedOperator(
            f"tensors of {dtype} have no place in the IR; convert them to a float or integer type"
        )
    return IR_DTYPES[dtype]


class Shapes:
    """Torch's symbols under our names, with the bounds the tracer gave them."""

    def __init__(self, names: Mapping[str, str] | None = None) -> None:
        self._names = dict(names or {})

    def dim(self, value: Any) -> Dim:
        """A size as a dimension. Raises ``UnsupportedOperator`` for what is no sum, product or floored quotient."""
        if isinstance(value, int):
            return int(value)
        return dim(self._convert(value.node.expr if hasattr(value, "node") else value))

    def name(self, torch_symbol: str) -> str:
        """Our name of a symbol: the one given, or ``T0``, ``T1`` ... in order of appearance."""
        if torch_symbol not in self._names:
            self._names[torch_symbol] = f"T{len(self._names)}"
        return self._names[torch_symbol]

    @property
    def symbols(self) -> Mapping[str, str]:
        return self._names

    def _convert(self, expr: sympy.Expr) -> sympy.Expr:
        if expr.is_Integer:
            return expr
        if expr.is_Symbol:
            return symbol(self.name(expr.name))
        args = [self._convert(a) for a in expr.args]
        match type(expr).__name__:
            case "Add":
                return sympy.Add(*args)
            case "Mul":
                return sympy.Mul(*args)
            case "Pow" if args[1].is_Integer and args[1] > 0:
                return sympy.Pow(*args)
            case "FloorDiv" | "CleanDiv":
                return FloorDiv(*args)
        raise UnsupportedOperator(
            f"a size of {expr} cannot be written in the IR (sums, products, floored quotients can)"
        )

    def type(self, tensor: torch.Tensor) -> TensorType:
        return TensorType(dtype_name(tensor.dtype), tuple(self.dim(s) for s in tensor.shape))


def bounds(env: Any, torch_name: str) -> tuple[int, int]:
    """The range the tracer knows of a symbol, cut to what a dimension may have."""
    limit = 2**31 - 1
    if env is None:
        return 0, limit
    for key, known in env.var_to_range.items():
        if key.name == torch_name:
            # Compared before they become numbers: torch's infinity calls itself finite.
            low, high = (int(min(limit, max(0, end))) for end in (known.lower, known.upper))
            return low, high
    return 0, limit
