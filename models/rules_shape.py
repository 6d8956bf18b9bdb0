"""Lowering rules for operators that move, join, cut and make tensors."""

from typing import Any

from torch import fx

from compilerllm.ir.dims import Dim
from compilerllm.ir.graph import Value
from compilerllm.ir.types import FLOAT_DTYPES
from compilerllm.models.lower import Lowering, Result, Scalar, rule


def reshape(low: Lowering, x: Value, shape: tuple[Dim, ...]) -> Value:
    """``x`` itself where it has that shape already."""
    return x if x.shape == shape else low.b.emit("reshape", x, shape=shape)


@rule(
    "aten.view.default", "aten.reshape.default", "aten._unsafe_view.default", "aten.unsqueeze.default",
    "aten.squeeze.dim", "aten.squeeze.dims", "aten.squeeze.default", "aten.flatten.using_ints", "aten.unflatten.int",
    "aten._reshape_copy.default", "aten.view_copy.default",
)  # fmt: skip
def _reshape(low: Lowering, node: fx.Node) -> Result | None:
    return reshape(low, low.value(low.arg(node, 0)), low.type(node).shape)


def permute(low: Lowering, x: Value, order: tuple[int, ...]) -> Value:
    if order == tuple(range(len(order))):
        return x
    result = low.b.emit("permute", x, order=order)
    if order == (1, 0):
        low.untransposed[result] = x
    return result


@rule(
    "aten.transpose.int", "aten.t.default", "aten.permute.default", "aten.numpy_T.default", "aten.mT.default"
)
def _permute(low: Lowering, node: fx.Node) -> Result | None:
    x = low.value(low.arg(node, 0))
    rank = x.tensor.rank
    order = list(range(rank))
    match str(node.target):
        case "aten.permute.default":
            order = [a % rank for a in low.arg(node, 1)]
        case "aten.transpose.int":
            a, b = int(low.arg(node, 1)) % rank, int(low.arg(node, 2)) % rank
            order[a], order[b] = order[b], order[a]
        case "aten.mT.default":
            order[-1], order[-2] = order[-2], order[-1]
        case _:
            order.reverse()
    return permute(low, x, tuple(order))


@rule("aten.expand.default")
def _expand(low: Lowering, node: fx.Node) -> Result | None:
    x, shape = low.value(low.arg(node, 0)), low.type(node).shape
    if x.shape == shape:
        return x
    return low.b.emit("expand", reshape(low, x, (1,) * (len(shape) - x.tensor.rank) + x.shape), shape=shape)


def cut(low: Lowering, x: Value, axis: int, start: Dim, stop: Dim, step: int = 1) -> Value:
    if start == 0 and stop == x.shape[axis] and step == 1:
        return x
    attrs: dict[str, Any] = {"axis": axis, "start": start, "stop": stop} | (
        {"step": step} if step != 1 else {}
    )
    return low.b.emit("slice", x, **attrs)


@rule("aten.slice.Tensor")
def _slice(low: Lowering, node: fx.Node) -> Result | None:
    x = low.value(low.arg(node, 0))
    axis = int(low.arg(node, 1, "dim", 0)) % x.tensor.rank
    extent, step = x.shape[axis], low.arg(node, 4, "step", 1)
    start, stop = (_bound(low, low.arg(node, i, n), extent) for i, n in ((2, "start"), (3, "end")))
    if not isinstance(step, int) or (start is None and low.arg(node, 2, "start") is not None):
        return None
    start = 0 if start is None else start
    length = low.type(node).shape[axis]
    if isinstance(extent, int) and isinstance(start, int):
        start = min(start, extent)
        stop = extent if stop is None or not isinstance(stop, int) else max(start, min(stop, extent))
        return cut(low, x, axis, start, stop, step)
    if step != 1:
        return None
    return cut(low, x, axis, start, start + length)


def _bound(low: Lowering, given: Any, extent: Dim) -> Dim | None:
    """A start or stop counted from the front; None where it was left out."""
    if given is None:
        return None
    bound = low.shapes.dim(given.meta["val"] if isinstance(given, fx.Node) else given)
    return extent + bound if isinstance(bound, int) and bound < 0 else bound


@rule("aten.select.int")
def _select(low: Lowering, node: fx.Node) -> Result | None:
    x = low.value(low.arg(node, 0))
    axis = int(low.arg(node, 1)) % x.tensor.rank
    index = _bound(low, low.arg(node, 2), x.shape[axis])
    if index is None:
        return None
    return reshape(low, cut(low, x, axis, index, index + 1), low.type(node).shape)


@rule(
    "aten.split.Tensor", "aten.split.sizes", "aten.split_with_sizes.default", "aten.chunk.default", "aten.unbind.int",
    "aten.split_with_sizes_copy.default",
)  # fmt: skip
def _split(low: Lowering, node: fx.Node) -> Result | None:
    x = low.value(low.arg(node, 0))
    unbind = "unbind" in str(node.target)
    axis = int(low.arg(node, 1 if unbind else 2, "dim", 0)) % x.tensor.rank
    parts: list[Value] = []
    start: Dim = 0
    for index in range(len(node.meta["val"])):
        found = low.type(node, index)
        length: Dim = 1 if unbind else found.shape[axis]
        piece = cut(low, x, axis, start, start + length)
        parts.append(reshape(low, piece, found.shape) if unbind else piece)
        start = start + length
    return tuple(parts)


@rule("aten.cat.default")
def _cat(low: Lowering, node: fx.Node) -> Result | None:
    want = low.type(node)
    axis = int(low.arg(node, 1, "dim", 0)) % want.rank
    parts = [low.value(a) for a in low.arg(node, 0)]
    parts = [p for p in parts if not (p.tensor.rank == 1 and p.shape == (0,) and want.rank > 1)]
    parts = [p if p.dtype == want.dtype else low.b.emit("cast", p, dtype=want.dtype) for p in parts]
    return parts[0] if len(parts) == 1 else low.b.emit("concat", *parts, axis=axis)


@rule("aten.stack.default")
def _stack(low: Lowering, node: fx.Node) -> Result | None:
    want = low.type(node)
    axis = int(low.arg(node, 1, "dim", 0)) % want.rank
    one = (*want.shape[:axis], 1, *want.shape[axis + 1 :])
    parts = [reshape(low, low.value(a), one) for a in low.arg(node, 0)]
    return parts[0] if len(parts) == 1 else low.b.emit("concat", *parts, axis=axis)


@rule(
    "aten.full.default", "aten.full_like.default", "aten.zeros.default", "aten.zeros_like.default", "aten.ones.default",
    "aten.ones_like.default", "aten.scalar_tensor.default", "aten.new_zeros.default", "aten.new_ones.default",
    "aten.new_full.default",
)  # fmt: skip
def _full(low: Lowering, node: fx.Node) -> Result | None:
    want, target = low.type(node), str(node.target)
    if "zeros" in target:
        value: Any = 0
    elif "ones" in target:
        value = 1
    elif "scalar_tensor" in target:
        value = low.arg(node, 0)
    else:
        value = low.arg(node, 2 if "new_full" in target else 1, "fill_value")
    if isinstance(value, fx.Node):
        return None
    if want.dtype == "bool":
        value = bool(value)
    elif want.dtype in FLOAT_DTYPES:
        value = float(value)
    if want.rank == 0:
        return Scalar(value, want.dtype)
    return low.b.emit("full", shape=want.shape, value=value, dtype=want.dtype)


@rule("aten.arange.default", "aten.arange.start", "aten.arange.start_step")
def _arange(low: Lowering, node: fx.Node) -> Result | None:
    want = low.type(node)
    counted = str(node.target) == "aten.arange.default"
    start = 0 if counted else low.arg(node, 0)
    step = low.arg(node, 2, "step", 1) if str(node.target).endswith("start_step") else 1
    if want.dtype not in ("i64", "i32") or not isinstance(start, int) or not isinstance(step, int):
        return None
    result = low.b.emit("iota", size=want.shape[0], dtype=want.dtype)
    if step != 1:
        result = low.b.emit("mul", result, scalar=step)
    return low.b.emit("add", result, scalar=start) if start else result


@rule("aten.index_select.default")
def _index_select(low: Lowering, node: fx.Node) -> Result | None:
    x, rows = low.value(low.arg(node, 0)), low.value(low.arg(node, 2))
    if int(low.arg(node, 1)) % x.tensor.rank != 0 or rows.tensor.rank != 1:
        return None
    return low.b.emit("gather_rows", x, rows)
