"""Take away the batch axis of extent 1 that capture leaves in front of every value.

Before::

    func @layer(%x: bf16[1, T, 64]) {
      %h = linear(%x, %w) : bf16[1, T, 64]
      %q = reshape(%h, shape=[1, T, 4, 16]) : bf16[1, T, 4, 16]

After::

    func @layer(%x: bf16[T, 64]) {
      %h = linear(%x, %w) : bf16[T, 64]
      %q = reshape(%h, shape=[T, 4, 16]) : bf16[T, 4, 16]

Every value is followed with the place of its batch axis. An op that can do without the axis is emitted without it;
any other (an opaque ``aten`` node, say) gets its operands reshaped back, so that the result is right in any case.
Inputs and outputs of all functions lose a leading extent of 1.
"""

from collections.abc import Sequence

from compilerllm.ir.builder import Rewriter
from compilerllm.ir.dims import Dim
from compilerllm.ir.graph import Graph, Node, Value
from compilerllm.ir.types import TensorType
from compilerllm.passes.opinfo import ALONG_AXIS, BINARY, LAST_AXIS, UNARY, same_graph
from compilerllm.passes.report import PassReport

_LIKE_X = LAST_AXIS | UNARY | {"cast", "softcap", "embedding", "rotary_table", "rope"}
_BROADCASTING = BINARY | {"where", "gated_act", "matmul"}


def drop_batch(graph: Graph, report: PassReport) -> Graph:
    """Rewrite one function; calls in it pass values without the axis, as their callees take them afterwards."""
    inputs = tuple(Value(v.name, _squeezed(v.type)) if has_batch(v) else v for v in graph.inputs)
    dropper = _Dropper(graph, inputs)
    for old, new in zip(graph.inputs, inputs, strict=True):
        if old is not new:
            dropper.axis[old] = 0
            dropper.set(old, new)
            report.match()
    return same_graph(graph, dropper.run(lambda _, node: dropper.visit(node)))


def has_batch(value: Value) -> bool:
    """Whether a value at a function's boundary has the axis: rank 2 or more, and 1 in front."""
    type = value.type
    return isinstance(type, TensorType) and type.rank >= 2 and type.shape[0] == 1


def _squeezed(type: object) -> TensorType:
    assert isinstance(type, TensorType)
    return type.with_shape(*type.shape[1:])


class _Dropper(Rewriter):
    """``axis[v]``: where the old value ``v`` had the axis that what stands for it lacks."""

    def __init__(self, graph: Graph, inputs: Sequence[Value]) -> None:
        super().__init__(graph, by="drop_batch", inputs=inputs)
        self.axis: dict[Value, int] = {}
        self._reshaped: dict[tuple[Value, tuple[Dim, ...]], Value] = {}

    def finish(self, *outputs: Value) -> Graph:
        """Outputs lose a leading extent of 1, whether or not it was followed to here."""
        return super().finish(
            *(self.without(v, 0) if has_batch(v) else self.whole(v) for v in self.graph.outputs)
        )

    def visit(self, node: Node) -> tuple[Value, ...] | None:
        if node.op == "call":
            return self._call(node)
        if node.op == "full":
            shape = node.dimensions("shape")
            if len(shape) >= 2 and shape[0] == 1:
                return self._as(node, 0, *self.emit_node("full", (), {**node.attrs, "shape": shape[1:]}))
            return None
        if not any(v in self.axis for v in node.operands) and node.op != "reshape":
            return None
        if node.op in _LIKE_X:
            return self._like_x(node)
        if node.op in _BROADCASTING:
            return self._broadcasting(node)
        if node.op in ALONG_AXIS:
            return self._along_axis(node)
        match node.op:
            case "reshape":
                return self._reshape(node)
            case "permute":
                return self._permute(node)
            case "expand":
                return self._expand(node)
            case "slice":
                return self._slice(node)
            case "concat":
                return self._concat(node)
        return self._opaque(node)

    def _as(self, node: Node, axis: int, *outputs: Value) -> tuple[Value, ...]:
        for old in node.outputs:
            self.axis[old] = axis
        return outputs

    def _reshape_to(self, value: Value, shape: tuple[Dim, ...]) -> Value:
        if value.shape == shape:
            return value
        key = (value, shape)
        if key not in self._reshaped:
            self._reshaped[key] = self.emit("reshape", value, shape=shape, name=value.name)
        return self._reshaped[key]

    def whole(self, old: Value) -> Value:
        """What stands for ``old``, with its old shape."""
        new = self.get(old)
        return self._reshape_to(new, old.shape) if isinstance(old.type, TensorType) else new

    def without(self, old: Value, axis: int) -> Value:
        """What stands for ``old``, less the extent of 1 at ``axis``."""
        return self._reshape_to(self.get(old), (*old.shape[:axis], *old.shape[axis + 1 :]))

    def _like_x(self, node: Node) -> tuple[Value, ...] | None:
        """The result has the axis where the first operand has it."""
        x = node.operands[0]
        axis = self.axis.get(x)
        last = x.tensor.rank - 1 - (2 if node.op == "rope" else 0)
        elementwise = node.op in UNARY or node.op in ("cast", "softcap", "embedding", "rotary_table")
        if axis is None or (axis > last if elementwise or node.op == "rope" else axis >= last):
            return self._opaque(node)
        operands: list[Value | None] = [self.get(x)]
        for value in node.inputs[1:]:
            if value is None:
                operands.append(None)
            elif node.op == "rope" and value.tensor.rank > 2:
                if value.shape[0] != 1:
                    return self._opaque(node)
                operands.append(self.without(value, 0))
            else:
                operands.append(self.whole(value))
        return self._as(node, axis, *self.emit_node(node.op, operands, node.attrs, name=node.outputs[0].name))

    def _broadcasting(self, node: Node) -> tuple[Value, ...] | None:
        rank = node.output.tensor.rank
        places = {self.axis[v] - v.tensor.rank for v in node.operands if v in self.axis}
        if len(places) > 1:
            return self._opaque(node)
        place = places.pop()
        if node.output.shape[place] != 1 or (node.op == "matmul" and place >= -2):
            return self._opaque(node)
        operands = [
            self.without(v, v.tensor.rank + place) if v.tensor.rank >= -place else v for v in node.operands
        ]
        return self._as(
            node, rank + place, *self.emit_node(node.op, operands, node.attrs, name=node.output.name)
        )

    def _along_axis(self, node: Node) -> tuple[Value, ...] | None:
        x = node.operands[0]
        batch, axis = self.axis[x], node.integer("axis") % x.tensor.rank
        if axis == batch:
            return self._opaque(node)
        attrs = {**node.attrs, "axis": axis - (axis > batch)}
        shrinks = node.output.tensor.rank < x.tensor.rank and axis < batch
        return self._as(
            node, batch - shrinks, *self.emit_node(node.op, (self.get(x),), attrs, name=node.output.name)
        )

    def _reshape(self, node: Node) -> tuple[Value, ...] | None:
        x, shape = node.operands[0], node.dimensions("shape")
        if len(shape) >= 2 and shape[0] == 1:
            return self._as(node, 0, self._fresh_reshape(x, shape[1:], node))
        return (self._fresh_reshape(x, shape, node),) if x in self.axis else None

    def _fresh_reshape(self, x: Value, shape: tuple[Dim, ...], node: Node) -> Value:
        return self.emit("reshape", self.get(x), shape=shape, name=node.output.name)

    def _permute(self, node: Node) -> tuple[Value, ...] | None:
        x = node.operands[0]
        order = node.integers("order")
        batch = self.axis[x]
        rest = tuple(i - (i > batch) for i in order if i != batch)
        result = self.emit("permute", self.get(x), order=rest, name=node.output.name)
        return self._as(node, order.index(batch), result)

    def _expand(self, node: Node) -> tuple[Value, ...] | None:
        x, shape = node.operands[0], node.dimensions("shape")
        place = self.axis[x] - x.tensor.rank
        if shape[place] != 1:
            return self._opaque(node)
        axis = len(shape) + place
        rest = (*shape[:axis], *shape[axis + 1 :])
        return self._as(node, axis, self.emit("expand", self.get(x), shape=rest, name=node.output.name))

    def _slice(self, node: Node) -> tuple[Value, ...] | None:
        x = node.operands[0]
        batch, axis = self.axis[x], node.integer("axis") % x.tensor.rank
        if axis == batch:
            return self._opaque(node)
        attrs = {**node.attrs, "axis": axis - (axis > batch)}
        return self._as(node, batch, *self.emit_node("slice", (self.get(x),), attrs, name=node.output.name))

    def _concat(self, node: Node) -> tuple[Value, ...] | None:
        batch = next(self.axis[v] for v in node.operands if v in self.axis)
        axis = node.integer("axis") % node.output.tensor.rank
        if axis == batch or any(v.shape[batch] != 1 for v in node.operands):
            return self._opaque(node)
        parts = [self.without(v, batch) for v in node.operands]
        attrs = {**node.attrs, "axis": axis - (axis > batch)}
        return self._as(node, batch, *self.emit_node("concat", parts, attrs, name=node.output.name))

    def _call(self, node: Node) -> tuple[Value, ...] | None:
        if not any(has_batch(v) or v in self.axis for v in (*node.operands, *node.outputs)):
            return None
        operands = [self.without(v, 0) if has_batch(v) else self.whole(v) for v in node.operands]
        types = [_squeezed(v.type) if has_batch(v) else v.tensor for v in node.outputs]
        outputs = self.emit_node("call", operands, node.attrs, types=types, name=node.outputs[0].name)
        self.axis.update({old: 0 for old in node.outputs if has_batch(old)})
        return outputs

    def _opaque(self, node: Node) -> tuple[Value, ...]:
        """Run the op as it was; its results lose a leading 1 by a reshape."""
        operands = [None if v is None else self.whole(v) for v in node.inputs]
        types = [v.tensor for v in node.outputs]
        name = node.outputs[0].name if node.outputs else None
        outputs = self.emit_node(node.op, operands, node.attrs, types=types, name=name)
        results = []
        for old, new in zip(node.outputs, outputs, strict=True):
            if has_batch(old):
                self.axis[old] = 0
                new = self._reshape_to(new, old.shape[1:])
            results.append(new)
        return tuple(results)
