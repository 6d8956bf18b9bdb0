"""Fit a module to one bucket: bounds of its dims, and numbers where a bound leaves one choice.

Before::

    func @layer(%step: step, %x: bf16[T, 64]) {
      dim T in [1, 4096]
      %h = linear(%x, %w) : bf16[T, 64]

After, for a bucket of one token::

    func @layer(%step: step, %x: bf16[1, 64]) {
      %h = linear(%x, %w) : bf16[1, 64]

A step has at least one token and one sequence, so a bucket of one leaves 1; it may sample no row at all, so R stays.
"""

from collections.abc import Mapping

from compilerllm.ir.dims import Dim, dim, free_dims, substitute
from compilerllm.ir.graph import Attr, DimDecl, Graph, Module, Node, Param, Value
from compilerllm.ir.step import Bucket
from compilerllm.ir.types import TensorType, Type
from compilerllm.passes.errors import PassError


def specialize(module: Module, bucket: Bucket) -> Module:
    """The module for steps that ``bucket`` holds. Raises ``PassError`` where a dim allows no step of the bucket."""
    bounds = {"T": (1, bucket.tokens), "S": (1, bucket.sequences), "R": (0, bucket.rows)}
    return module.with_functions(
        *(_Specializer(graph, bounds).graph() for graph in module.functions.values())
    )


class _Specializer:
    def __init__(self, graph: Graph, bounds: Mapping[str, tuple[int, int]]) -> None:
        self.old = graph
        self.dims: list[DimDecl] = []
        self.fixed: dict[str, Dim] = {}
        for decl in graph.dims:
            low, high = bounds.get(decl.name, (decl.low, decl.high))
            low, high = max(low, decl.low), min(high, decl.high)
            if low > high:
                raise PassError(
                    f"@{graph.name}: {decl.name} in [{decl.low}, {decl.high}] has no value of this bucket"
                )
            if low == high:
                self.fixed[decl.name] = low
            else:
                self.dims.append(DimDecl(decl.name, low, high))
        self.values: dict[Value, Value] = {}
        self.types: dict[Type, Type] = {}

    def graph(self) -> Graph:
        old = self.old
        if not self.fixed:
            return Graph(
                old.name, tuple(self.dims), old.inputs, old.params, old.states, old.nodes, old.outputs
            )
        return Graph(
            old.name, tuple(self.dims), tuple(map(self._value, old.inputs)),
            tuple(Param(self._value(p.value), p.recipe) for p in old.params), old.states,
            tuple(map(self._node, old.nodes)), tuple(map(self._value, old.outputs)),
        )  # fmt: skip

    def _value(self, value: Value) -> Value:
        if value not in self.values:
            type = self._type(value.type)
            self.values[value] = value if type is value.type else Value(value.name, type)
        return self.values[value]

    def _type(self, type: Type) -> Type:
        if not isinstance(type, TensorType):
            return type
        if type not in self.types:
            shape = tuple(substitute(d, self.fixed) for d in type.shape)
            self.types[type] = type if shape == type.shape else TensorType(type.dtype, shape)
        return self.types[type]

    def _node(self, node: Node) -> Node:
        attrs = {key: self._attr(value) for key, value in node.attrs.items()}
        outputs = tuple(map(self._value, node.outputs))
        if node.op == "step_field" and outputs != node.outputs:
            attrs["extent"] = outputs[0].shape[0]
        inputs = tuple(None if v is None else self._value(v) for v in node.inputs)
        same = outputs == node.outputs and inputs == node.inputs and attrs == dict(node.attrs)
        return node if same else Node(node.op, inputs, attrs, outputs, node.origin)

    def _attr(self, value: Attr) -> Attr:
        if isinstance(value, tuple):
            return tuple(self._attr(v) for v in value)
        if hasattr(value, "free_symbols") and free_dims(value) & self.fixed.keys():
            return substitute(dim(value), self.fixed)
        return value
