"""How norms, embeddings, gathered rows and fields of the step become launches."""

from typing import Any

from compilerllm.ir.graph import Node, Value
from compilerllm.kernels.errors import UnsupportedByTarget
from compilerllm.kernels.triton.emit_groups import covering, power_of_two, single
from compilerllm.kernels.triton.emitter import Arg, BucketEmitter, emitter
from compilerllm.kernels.triton.expressions import REGISTERS
from compilerllm.kernels.triton.groups import WIDEST_ROW
from compilerllm.kernels.triton.source import ConstValue

NORM_OPS = frozenset(("rms_norm", "layer_norm", "add_rms_norm", "add_layer_norm"))
ADDING = frozenset(("add_rms_norm", "add_layer_norm"))
WIDE_BLOCK = 4096  # columns at a time of rows wider than WIDEST_ROW
ROW_TILE = 2048  # elements of a program, where rows are shorter


@emitter("step_field")
def step_field(e: BucketEmitter, node: Node) -> None:
    """The field lies in the step's inputs already."""
    e.bind(node.output, e.step(node.text("field")))
    if node.output in e.graph.outputs:
        raise UnsupportedByTarget(f"{node!r} is a result of the model; results must be computed")


@emitter("rms_norm", "add_rms_norm", "layer_norm", "add_layer_norm")
def norm(e: BucketEmitter, node: Node) -> None:
    """A norm, with the add before it; of rows picked by index where they were gathered for it alone."""
    adds = node.op.startswith("add")
    x, residual = node.operand(0), node.operand(1) if adds else None
    weight, bias = _operand(node, 2 if adds else 1), _operand(node, 3 if adds else 2)
    normed, total = node.outputs[0], node.outputs[1] if adds else None
    if residual is not None and _is_zero(e, residual):
        residual = None
    index = None
    if (gathered := _gathered(e, x)) is not None:
        x, index = gathered
        residual = None if residual is None else _through(e, residual)
    lead = len(node.operand(0).shape) - 1
    columns = node.operand(0).shape[-1]
    if not isinstance(columns, int):
        raise UnsupportedByTarget(f"{node!r} has rows of {columns} columns, a number known only at run time")
    source = e.rows(x, lead)
    other = None if residual is None else e.rows(residual, lead)
    count = node.operand(0).tensor.numel // columns if lead else 1
    args: dict[str, Arg] = {"x": source.arg, "normed": e.arg(normed), "rows": e.extent(count)}
    absent: dict[str, ConstValue] = {}
    values: dict[str, Any] = {
        "residual": None if other is None else other.arg, "weight": weight and e.arg(weight), "bias": bias and e.arg(bias),
        "index": index and e.arg(index), "total": total and e.arg(total),
    }  # fmt: skip
    for name, arg in values.items():
        if arg is None:
            absent[name] = None
        else:
            args[name] = arg
    constants: dict[str, ConstValue] = absent | {
        "X_STRIDE": source.stride, "RESIDUAL_STRIDE": 0 if other is None else other.stride, "COLUMNS": columns,
        "EPS": node.number("eps"), "OFFSET": float(node.number("offset", 0.0)), "CENTRE": "layer" in node.op,
        "ROUND_FIRST": bool(node.attrs.get("round_first")),
    }  # fmt: skip
    if columns > WIDEST_ROW or not all(p is None or e.is_param(p) for p in (weight, bias)):
        constants["BLOCK"] = WIDE_BLOCK
        e.launch(node, "norm:norm_wide", (e.extent(count), 1, 1), args, constants, num_warps=8)
        return
    block = power_of_two(columns)
    rows = max(1, min(power_of_two(e.bound(count)), ROW_TILE // block))
    constants |= {"BLOCK": block, "ROWS": rows}
    warps = max(1, min(16, block * rows // 512))
    e.launch(node, "norm:norm", (covering(e, count, rows), 1, 1), args, constants, num_warps=warps)


def _operand(node: Node, index: int) -> Value | None:
    return node.inputs[index] if index < len(node.inputs) else None


def _is_zero(e: BucketEmitter, value: Value) -> bool:
    """Whether it is zero everywhere: the residual before the first layer."""
    maker = e.producer(value)
    return maker is not None and maker.op == "full" and maker.number("value") == 0


def _gathered(e: BucketEmitter, value: Value) -> tuple[Value, Value] | None:
    """What rows are gathered from, and their index, where no one else wants the gathered rows."""
    maker = e.producer(value)
    if maker is None or not _for_norms(e, maker):
        return None
    return maker.operand(0), maker.operand(1)


def _through(e: BucketEmitter, value: Value) -> Value:
    maker = e.producer(value)
    assert maker is not None
    return maker.operand(0)


def _for_norms(e: BucketEmitter, node: Node) -> bool:
    """Whether a gather's rows go only into norms that can read all their rows through its index."""
    if node.op != "gather_rows" or node.output in e.graph.outputs or len(node.output.shape) != 2:
        return False
    index = e.producer(node.operand(1))
    if index is None or index.op != "step_field":  # only the step's inputs surely live until the norm runs
        return False
    for user in e.uses[node.output]:
        if user.op not in NORM_OPS:
            return False
        rows = user.operands[: 2 if user.op.startswith("add") else 1]
        if node.output not in rows or node.output in user.operands[len(rows) :]:
            return False
        for value in rows:
            maker = e.producer(value)
            if _is_zero(e, value):
                continue
            if maker is None or maker.op != "gather_rows" or maker.inputs[1] is not node.inputs[1]:
                return False
            if any(u.op not in NORM_OPS for u in e.uses[value]) or value in e.graph.outputs:
                return False
    return True


@emitter("gather_rows")
def gather_rows(e: BucketEmitter, node: Node) -> None:
    """Rows by index; nothing where the norm after it reads them so."""
    if _for_norms(e, node):
        return
    x, index, out = node.operand(0), node.operand(1), node.output
    source = e.rows(x, 1)
    block = min(1024, power_of_two(source.columns))
    e.launch(
        node, "embed:gather_rows", (e.extent(index.shape[0]), -(-source.columns // block), 1),
        {"x": source.arg, "index": e.arg(index), "out": e.arg(out)},
        {"STRIDE": source.stride, "COLUMNS": source.columns, "BLOCK": block},
    )  # fmt: skip


@emitter("embedding")
def embedding(e: BucketEmitter, node: Node) -> None:
    """Rows of a table. Ids below zero are tokens that the last step made, and only on the device."""
    ids, table, out = node.operand(0), node.operand(1), node.output
    columns = table.shape[1]
    if table.dtype not in REGISTERS or not isinstance(columns, int):
        raise UnsupportedByTarget(
            f"{node!r} reads a table packed as {table.dtype}; use a checkpoint that is not quantised, or --weights dense"
        )
    block = min(1024, power_of_two(columns))
    scaling, scale = _scaling(e, node), None
    if scaling is not None:
        out, scale = scaling.output, scaling.number("scalar")
    args: dict[str, Arg] = {"ids": e.arg(ids), "table": e.arg(table), "out": e.arg(out)}
    constants: dict[str, ConstValue] = {
        "COLUMNS": columns,
        "SCALE": scale,
        "BLOCK": block,
    }
    if e.is_step:
        args["last_token"] = e.typed(e.table("last_token"), "i32")
    else:
        constants["last_token"] = None
    e.launch(node, "embed:embedding", (e.extent(ids.tensor.numel), -(-columns // block), 1), args, constants)


@emitter("full")
def full(e: BucketEmitter, node: Node) -> None:
    """One value everywhere; nothing where it is the zero that a norm adds."""
    if node.number("value") == 0 and node.output not in e.graph.outputs:
        users = e.uses[node.output]
        if users and all(
            u.op in ADDING and u.inputs[1] is node.output and u.inputs[0] is not node.output for u in users
        ):
            return
    single(e, node)


def _scaling(e: BucketEmitter, node: Node) -> Node | None:
    """The multiplication by a number that alone reads an embedding."""
    users = e.uses[node.output]
    if node.output in e.graph.outputs or len(users) != 1:
        return None
    (user,) = users
    scales = user.op == "mul" and "scalar" in user.attrs and user.output.type == node.output.type
    return user if scales and node.output.dtype in ("f32", "bf16", "f16") else None


@emitter("mul")
def mul(e: BucketEmitter, node: Node) -> None:
    """A product; nothing where the embedding before it is scaled as it is read."""
    maker = e.producer(node.operand(0))
    if maker is not None and maker.op == "embedding" and _scaling(e, maker) is node:
        return
    single(e, node)
