"""Makes graphs: emits nodes with inferred types, unique names and an origin, and rewrites existing graphs."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from compilerllm.ir.errors import InvalidGraph
from compilerllm.ir.graph import NOWHERE, Attr, DimDecl, Graph, Node, Origin, Param, Value
from compilerllm.ir.op import lookup
from compilerllm.ir.recipe import Read, Recipe
from compilerllm.ir.types import TensorType, Type

_TRAILING_NUMBER = re.compile(r"_\d+$")


class Builder:
    """Collects one function. ``origin`` is given to every node emitted until it is changed.

    >>> b = Builder("main")
    >>> x = b.input("x", TensorType("f32", ("T", 8)))
    >>> y = b.emit("silu", x)
    >>> graph = b.finish(y)
    """

    def __init__(self, name: str, dims: Iterable[DimDecl] = ()) -> None:
        self.name = name
        self.origin = NOWHERE
        self._dims = {d.name: d for d in dims}
        self._inputs: list[Value] = []
        self._params: dict[str, Param] = {}
        self._states: dict[str, Value] = {}
        self._nodes: list[Node] = []
        self._names: dict[str, int] = {}

    def dim(self, name: str, low: int = 0, high: int = 2**31 - 1) -> None:
        """Declare a dimension (again: replaces its bounds)."""
        self._dims[name] = DimDecl(name, low, high)

    def fresh(self, hint: str) -> str:
        """A name not used yet in this function: the hint, or the hint with ``_1``, ``_2`` ..."""
        if hint not in self._names:
            self._names[hint] = 0
            return hint
        hint = _TRAILING_NUMBER.sub("", hint)
        count = self._names.get(hint, 0)
        while True:
            count += 1
            if (name := f"{hint}_{count}") not in self._names:
                self._names[hint] = count
                self._names[name] = 0
                return name

    def input(self, name: str, type: Type) -> Value:
        """Declare the next argument of the function."""
        value = Value(self.fresh(name), type)
        self._inputs.append(value)
        return value

    def param(self, name: str, type: TensorType, recipe: Recipe | None = None) -> Value:
        """A weight; asking again for the same name gives the same value."""
        if name not in self._params:
            if name in self._names:
                raise InvalidGraph(f"@{self.name}: parameter %{name} has the name of another value")
            self._names[name] = 0
            self._params[name] = Param(Value(name, type), recipe or Read(name))
        return self._params[name].value

    def state(self, name: str, type: Type) -> Value:
        """A state; asking again for the same name gives the same value."""
        if name not in self._states:
            self._states[name] = Value(self.fresh(name), type)
        return self._states[name]

    def adopt(
        self, *, inputs: Iterable[Value] = (), params: Iterable[Param] = (), states: Iterable[Value] = ()
    ) -> None:
        """Take over values of another graph as they are (a rewrite keeps identities it does not change)."""
        for value in inputs:
            self._names.setdefault(value.name, 0)
            self._inputs.append(value)
        for param in params:
            self._names.setdefault(param.name, 0)
            self._params[param.name] = param
        for value in states:
            self._names.setdefault(value.name, 0)
            self._states[value.name] = value

    def emit(
        self, op: str, *inputs: Value | None, types: Sequence[TensorType] | None = None, name: str | None = None,
        origin: Origin | None = None, **attrs: Attr,
    ) -> Value:  # fmt: skip
        """Add a node with one output. Raises ``TypeMismatch`` where the op's type rule refuses."""
        outputs = self.emit_many(op, *inputs, types=types, name=name, origin=origin, **attrs)
        if len(outputs) != 1:
            raise InvalidGraph(f"{op} gives {len(outputs)} values; use emit_many")
        return outputs[0]

    def emit_many(
        self, op: str, *inputs: Value | None, types: Sequence[TensorType] | None = None, name: str | None = None,
        origin: Origin | None = None, **attrs: Attr,
    ) -> tuple[Value, ...]:  # fmt: skip
        """Add a node with any number of outputs; ``types`` are needed where the op does not infer them."""
        return self.emit_node(op, inputs, attrs, types=types, name=name, origin=origin)

    def emit_node(
        self, op: str, inputs: Sequence[Value | None], attrs: Mapping[str, Attr], *,
        types: Sequence[TensorType] | None = None, name: str | None = None, origin: Origin | None = None,
    ) -> tuple[Value, ...]:  # fmt: skip
        """``emit_many`` for operands and attributes that come as collections."""
        inferred = lookup(op).infer(tuple(inputs), attrs)
        if inferred is None:
            if types is None:
                raise InvalidGraph(f"{op} does not infer its types; give them")
            inferred = tuple(types)
        outputs = tuple(Value(self.fresh(name or op), t) for t in inferred)
        self._nodes.append(Node(op, tuple(inputs), attrs, outputs, origin or self.origin))
        return outputs

    def append(self, node: Node) -> None:
        """Add a node as it is, its names kept (they must be free)."""
        for value in node.outputs:
            self._names.setdefault(value.name, 0)
        self._nodes.append(node)

    def finish(self, *outputs: Value) -> Graph:
        """The function. Params are in the order of their first mention."""
        return Graph(
            self.name, tuple(self._dims.values()), tuple(self._inputs), tuple(self._params.values()),
            tuple(self._states.values()), tuple(self._nodes), outputs,
        )  # fmt: skip


class Rewriter(Builder):
    """Copies a graph node by node; a node's handler may emit something else and name what stands for its outputs.

    >>> def visit(r: Rewriter, node: Node) -> tuple[Value, ...] | None: ...   # None keeps the node
    >>> new = Rewriter(graph, by="fuse_add_norm").run(visit)
    """

    def __init__(self, graph: Graph, by: str, *, inputs: Sequence[Value] | None = None) -> None:
        super().__init__(graph.name, graph.dims)
        self.graph, self.by = graph, by
        self._map: dict[Value, Value] = {}
        # Reserve all old names, so that what is emitted never collides with a node copied later.
        for value in graph.values():
            self._names.setdefault(value.name, 0)
        self.adopt(
            inputs=graph.inputs if inputs is None else inputs, params=graph.params, states=graph.states
        )

    def get(self, value: Value) -> Value:
        """What now stands for a value of the old graph."""
        return self._map.get(value, value)

    def set(self, old: Value, new: Value) -> None:
        """Let ``new`` stand for ``old`` from here on."""
        self._map[old] = new

    def copy(self, node: Node) -> tuple[Value, ...]:
        """Emit ``node`` again over the mapped inputs; types are inferred anew where they depend on the inputs."""
        inputs = tuple(None if v is None else self.get(v) for v in node.inputs)
        if all(a is b for a, b in zip(inputs, node.inputs, strict=True)):
            self.append(node)
            return node.outputs
        inferred = lookup(node.op).infer(inputs, node.attrs)
        if inferred is None or inferred == tuple(v.type for v in node.outputs):
            self.append(replace(node, inputs=inputs))
            return node.outputs
        outputs = tuple(Value(v.name, t) for v, t in zip(node.outputs, inferred, strict=True))
        self.append(replace(node, inputs=inputs, outputs=outputs))
        return outputs

    def run(
        self,
        visit: Callable[["Rewriter", Node], Sequence[Value] | None],
        *,
        skip: frozenset[Node] = frozenset(),
    ) -> Graph:
        """Visit each node in order (those in ``skip`` are left out) and finish with the mapped outputs."""
        for node in self.graph.nodes:
            if node in skip:
                continue
            self.origin = node.origin.touched(self.by)
            result = visit(self, node)
            if result is None:
                result = self.copy(node)
            for old, new in zip(node.outputs, result, strict=True):
                if old is not new:
                    self._map[old] = new
        return prune(self.finish(*(self.get(v) for v in self.graph.outputs)))


def prune(graph: Graph) -> Graph:
    """Drop nodes whose results nobody uses and that have no effect, then params and states nobody uses."""
    live = set(graph.outputs)
    kept: list[Node] = []
    for node in reversed(graph.nodes):
        if not lookup(node.op).pure or any(v in live for v in node.outputs):
            kept.append(node)
            live.update(node.operands)
    if (
        len(kept) == len(graph.nodes)
        and all(p.value in live for p in graph.params)
        and all(s in live for s in graph.states)
    ):
        return graph
    return replace(
        graph, nodes=tuple(reversed(kept)), params=tuple(p for p in graph.params if p.value in live),
        states=tuple(s for s in graph.states if s in live),
    )  # fmt: skip


def inline(
    b: Builder, graph: Graph, inputs: Sequence[Value], bind: Mapping[Value, Value] | None = None
) -> tuple[Value, ...]:
    """Emit a function's nodes into ``b``. ``bind`` says what stands for its params and states."""
    table: dict[Value, Value] = dict(zip(graph.inputs, inputs, strict=True)) | dict(bind or {})
    for node in graph.nodes:
        outputs = b.emit_many(
            node.op, *(None if v is None else table[v] for v in node.inputs),
            types=[v.tensor for v in node.outputs], origin=node.origin, name=node.outputs[0].name if node.outputs else None,
            **node.attrs,
        )  # fmt: skip
        table.update(zip(node.outputs, outputs, strict=True))
    return tuple(table[v] for v in graph.outputs)
