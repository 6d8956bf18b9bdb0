"""Lowering rules for pointwise operators and reductions."""

import struct
from typing import Any

import torch
from torch import fx

from compilerllm.ir.graph import Value
from compilerllm.ir.types import FLOAT_DTYPES, TensorType
from compilerllm.models.lower import Lowering, Result, Scalar, rule
from compilerllm.models.shapes import dtype_name

_UNARY = (
    "neg", "abs", "exp", "log", "sqrt", "rsqrt", "reciprocal", "tanh", "sigmoid", "silu", "relu", "sin", "cos", "erf",
    "floor", "log1p", "square", "logical_not",
)  # fmt: skip
_BINARY = {
    "add": "add", "sub": "sub", "mul": "mul", "div": "div", "pow": "pow", "maximum": "maximum", "minimum": "minimum",
    "remainder": "remainder", "floor_divide": "floor_div", "logical_and": "logical_and", "logical_or": "logical_or",
    "eq": "eq", "ne": "ne", "lt": "lt", "le": "le", "gt": "gt", "ge": "ge",
}  # fmt: skip


def round_scalar(scalar: Scalar, dtype: str) -> Scalar:
    """The constant after a cast, rounded as the tensor would be."""
    if dtype == "bool":
        return Scalar(bool(scalar.value), dtype)
    if dtype not in FLOAT_DTYPES:
        return Scalar(int(scalar.value), dtype)
    value = float(scalar.value)
    if dtype == "f32":
        value = struct.unpack("f", struct.pack("f", value))[0]
    elif dtype in ("bf16", "f16"):
        value = float(torch.tensor(value, dtype=torch.bfloat16 if dtype == "bf16" else torch.float16))
    return Scalar(value, dtype)


def _unary_rule(op: str) -> None:
    @rule(f"aten.{op}.default")
    def lower(low: Lowering, node: fx.Node) -> Result | None:
        x = low.value(low.arg(node, 0))
        if not x.tensor.is_float and op not in ("neg", "abs", "logical_not", "square"):
            x = low.b.emit("cast", x, dtype="f32")
        if op == "logical_not" and x.dtype != "bool":
            return low.b.emit("eq", x, scalar=0)
        return low.b.emit(op, x)


for _op in _UNARY:
    _unary_rule(_op)


@rule("aten.gelu.default")
def _gelu(low: Lowering, node: fx.Node) -> Result | None:
    how = low.arg(node, 1, "approximate", "none")
    return low.b.emit("gelu" if how == "none" else "gelu_tanh", low.value(low.arg(node, 0)))


@rule("aten.bitwise_not.default")
def _bitwise_not(low: Lowering, node: fx.Node) -> Result | None:
    x = low.value(low.arg(node, 0))
    return low.b.emit("logical_not", x) if x.dtype == "bool" else None


def binary(low: Lowering, op: str, a: Value | Scalar, b: Value | Scalar, want: TensorType) -> Value | None:
    """``op(a, b)`` with constants folded into the attribute ``scalar``, where that keeps torch's promotion."""
    compare = want.dtype == "bool"
    if isinstance(a, Scalar) and isinstance(b, Scalar):
        return None
    if isinstance(a, Value) and isinstance(b, Value):
        return low.b.emit(op, a, b)
    tensor, scalar = (a, b) if isinstance(b, Scalar) else (b, a)
    assert isinstance(tensor, Value) and isinstance(scalar, Scalar)
    if not compare and tensor.dtype != want.dtype:
        tensor = low.b.emit("cast", tensor, dtype=want.dtype)
    number: bool | int | float = scalar.value
    if tensor.tensor.is_float and not compare:
        number = float(number)
    attrs: dict[str, Any] = {"scalar": number} | ({"reverse": True} if isinstance(a, Scalar) else {})
    if op == "pow" and number == 2 and "reverse" not in attrs:
        return low.b.emit("square", tensor)
    if op in ("add", "mul") and "reverse" in attrs:
        del attrs["reverse"]
    return low.b.emit(op, tensor, **attrs)


def _binary_rule(name: str, op: str) -> None:
    @rule(*(f"aten.{name}.{o}" for o in _OVERLOADS.get(name, ("Tensor", "Scalar"))))
    def lower(low: Lowering, node: fx.Node) -> Result | None:
        if low.arg(node, 2, "alpha", 1) != 1:
            return None
        return binary(low, op, low.operand(low.arg(node, 0)), low.operand(low.arg(node, 1)), low.type(node))


_OVERLOADS = {
    "pow": ("Tensor_Scalar", "Scalar", "Tensor_Tensor"), "maximum": ("default",), "minimum": ("default",),
    "floor_divide": ("default", "Scalar"), "logical_and": ("default",), "logical_or": ("default",),
}  # fmt: skip
for _name, _op in _BINARY.items():
    _binary_rule(_name, _op)


@rule("aten.div.Tensor_mode", "aten.div.Scalar_mode")
def _div_mode(low: Lowering, node: fx.Node) -> Result | None:
    mode = low.arg(node, 2, "rounding_mode")
    if mode not in (None, "floor"):
        return None
    op = "div" if mode is None else "floor_div"
    return binary(low, op, low.operand(low.arg(node, 0)), low.operand(low.arg(node, 1)), low.type(node))


@rule("aten.rsub.Tensor", "aten.rsub.Scalar")
def _rsub(low: Lowering, node: fx.Node) -> Result | None:
    if low.arg(node, 2, "alpha", 1) != 1:
        return None
    return binary(low, "sub", low.operand(low.arg(node, 1)), low.operand(low.arg(node, 0)), low.type(node))


@rule("aten.bitwise_and.Tensor", "aten.bitwise_or.Tensor", "aten.__and__.Tensor", "aten.__or__.Tensor")
def _bitwise(low: Lowering, node: fx.Node) -> Result | None:
    if low.type(node).dtype != "bool":
        return None
    op = "logical_and" if "and" in str(node.target) else "logical_or"
    return low.b.emit(op, low.value(low.arg(node, 0)), low.value(low.arg(node, 1)))


@rule("aten.where.self")
def _where(low: Lowering, node: fx.Node) -> Result | None:
    return low.b.emit("where", *(low.value(a) for a in node.args))


@rule("aten.masked_fill.Scalar")
def _masked_fill(low: Lowering, node: fx.Node) -> Result | None:
    x, mask = low.value(low.arg(node, 0)), low.value(low.arg(node, 1))
    fill = low.b.emit("full", shape=(), value=low.arg(node, 2), dtype=x.dtype)
    return low.b.emit("where", mask, fill, x)


@rule("aten.clamp.default", "aten.clamp_min.default", "aten.clamp_max.default", "aten.hardtanh.default")
def _clamp(low: Lowering, node: fx.Node) -> Result | None:
    x, target = low.value(low.arg(node, 0)), str(node.target)
    if x.dtype != low.type(node).dtype:
        return None
    if target == "aten.clamp_max.default":
        least, most = None, low.arg(node, 1)
    else:
        defaults = (-1.0, 1.0) if target == "aten.hardtanh.default" else (None, None)
        least = low.arg(node, 1, "min_val" if "hard" in target else "min", defaults[0])
        most = low.arg(node, 2, "max_val" if "hard" in target else "max", defaults[1])
    for op, limit in (("maximum", least), ("minimum", most)):
        if limit is not None:
            if not isinstance(limit, int | float):
                return None
            x = low.b.emit(op, x, scalar=float(limit) if x.tensor.is_float else limit)
    return x


@rule("aten._to_copy.default", "aten.to.dtype", "aten.type_as.default", "prims.convert_element_type.default")
def _cast(low: Lowering, node: fx.Node) -> Result | None:
    found = low.operand(low.arg(node, 0))
    dtype = low.type(node).dtype
    if isinstance(found, Scalar):
        return round_scalar(found, dtype)
    return found if found.dtype == dtype else low.b.emit("cast", found, dtype=dtype)


@rule(
    "aten.clone.default", "aten.alias.default", "aten.contiguous.default", "aten.detach.default", "aten.dropout.default",
    "aten.lift_fresh_copy.default", "aten.detach_.default", "aten.lift_fresh.default",
)  # fmt: skip
def _same(low: Lowering, node: fx.Node) -> Result | None:
    if (
        str(node.target) == "aten.dropout.default"
        and low.arg(node, 2, "train", False)
        and low.arg(node, 1, "p", 0.0)
    ):
        return None
    return low.operand(low.arg(node, 0))


def _one_axis(axes: Any, rank: int) -> int | None:
    found = [axes] if isinstance(axes, int) else list(axes or range(rank))
    return found[0] % rank if len(found) == 1 and rank else None


def _reduce(
    low: Lowering, node: fx.Node, op: str, axes: Any, keepdim: bool, dtype: torch.dtype | None
) -> Result | None:
    x = low.value(low.arg(node, 0))
    axis = _one_axis(axes, x.tensor.rank)
    if axis is None:
        return None
    wanted = dtype_name(dtype) if dtype is not None else low.type(node).dtype
    if op != "argmax" and x.dtype != wanted:
        x = low.b.emit("cast", x, dtype=wanted)
    attrs: dict[str, Any] = {"axis": axis} | ({"keepdim": True} if keepdim else {})
    return low.b.emit(op, x, **attrs)


@rule("aten.sum.dim_IntList", "aten.mean.dim")
def _sum(low: Lowering, node: fx.Node) -> Result | None:
    op = str(node.target).split(".")[1]
    return _reduce(
        low, node, op, low.arg(node, 1), bool(low.arg(node, 2, "keepdim")), low.arg(node, 3, "dtype")
    )


@rule("aten.prod.dim_int")
def _prod(low: Lowering, node: fx.Node) -> Result | None:
    return _reduce(
        low, node, "prod", low.arg(node, 1), bool(low.arg(node, 2, "keepdim")), low.arg(node, 3, "dtype")
    )


@rule("aten.amax.default", "aten.amin.default", "aten.argmax.default")
def _extreme(low: Lowering, node: fx.Node) -> Result | None:
    op = str(node.target).split(".")[1]
    axes = low.arg(node, 1, "dim")
    if op == "argmax" and axes is None:
        return None
    return _reduce(low, node, op, axes, bool(low.arg(node, 2, "keepdim")), None)


@rule("aten.softmax.int", "aten._softmax.default", "aten.cumsum.default")
def _along_axis(low: Lowering, node: fx.Node) -> Result | None:
    op = "cumsum" if "cumsum" in str(node.target) else "softmax"
    x = low.value(low.arg(node, 0))
    dtype = low.type(node).dtype
    if x.dtype != dtype:
        x = low.b.emit("cast", x, dtype=dtype)
    return low.b.emit(op, x, axis=int(low.arg(node, 1)) % x.tensor.rank)


@rule("aten.topk.default")
def _topk(low: Lowering, node: fx.Node) -> Result | None:
    x = low.value(low.arg(node, 0))
    axis = low.arg(node, 2, "dim", -1)
    if axis % x.tensor.rank != x.tensor.rank - 1 or not low.arg(node, 3, "largest", True):
        return None
    return low.b.emit_many("topk", x, k=int(low.arg(node, 1)))
