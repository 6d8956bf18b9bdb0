"""A large module made small for validating: fewer layers, and every size divided where all sizes that hang on it can be.

Sizes are followed through the graph: axes that an op needs equal are one class, a reshape relates the product of some
to the product of others, a slice's or a concat's parts scale with the whole. Each class is divided by a power of two,
as large as all of its sizes, and of the ranges cut out of them, can take. What the rules here do not know (opaque torch
operators, experts' number, a reduction's result) keeps its size. Windows become a few tokens.

The small module has the same nodes in the same order. That the passes treat it as they treat the large one is checked
afterwards (``build.py``), not assumed. What it cannot show is an error that needs large sizes: an index past 2^31, or a
sum so long that its rounding matters; those are the kernels' tests' business.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace

from compilerllm.ir.dims import Dim, free_dims, substitute
from compilerllm.ir.graph import Attr, Graph, Module, Node, Param, Value
from compilerllm.ir.recipe import Literal, Read, Recipe, print_recipe
from compilerllm.ir.types import TensorType, Type
from compilerllm.ir.verify import verify
from compilerllm.passes.opinfo import ALONG_AXIS, BINARY, UNARY, axis_of

LAYERS = 2  # calls of a function that are kept
FLOORS = {"heads": 2, "dim": 8, "table": 64, "other": 32}  # no size of its class becomes less
MANY = 2**22  # weights from which on a module is made small
BLOCK = 32  # weights a block of a packed type
WINDOW = 6  # tokens; the next larger window of a module gets one more
Axis = tuple[Value, int]


def thin(module: Module, layers: int = LAYERS) -> Module:
    """At most ``layers`` calls of each function of ``main``, the first ones. A call that goes gives what it was given.

    Only a call whose results have the types of operands can go: those of a residual stream.
    """
    main = module.main
    seen: dict[str, int] = {}
    table: dict[Value, Value] = {}
    nodes: list[Node] = []
    for node in main.nodes:
        inputs = tuple(None if v is None else table.get(v, v) for v in node.inputs)
        if node.op == "call":
            seen[node.fn] = seen.get(node.fn, 0) + 1
            if seen[node.fn] > layers and (passed := _passed(node, inputs)) is not None:
                table.update(zip(node.outputs, passed, strict=True))
                continue
        nodes.append(node if inputs == node.inputs else replace(node, inputs=inputs))
    outputs = tuple(table.get(v, v) for v in main.outputs)
    return module.with_functions(replace(main, nodes=tuple(nodes), outputs=outputs))


def _passed(node: Node, inputs: tuple[Value | None, ...]) -> list[Value] | None:
    """An operand for each result, of its type, each once."""
    left = [v for v in inputs if v is not None]
    found: list[Value] = []
    for value in node.outputs:
        match = next((v for v in left if v.type == value.type), None)
        if match is None:
            return None
        left.remove(match)
        found.append(match)
    return found


def shrink(module: Module, layers: int = LAYERS) -> Module:
    """The module made small. Recipes become plain reads, since its checkpoint is made up."""
    module = thin(module, layers)
    sizes = _Sizes(module)
    small = _Small(module, sizes.solve()).module()
    verify(small)
    return small


def small_enough(module: Module) -> Module:
    """The module itself where its weights are few, else made small."""
    elements = sum(math.prod(int(d) for d in i.type.shape) for i in module.param_instances())
    return module if elements <= MANY else shrink(module)


class _Sizes:
    """Classes of axes, what they may be divided by, and the products that reshapes relate."""

    def __init__(self, module: Module) -> None:
        self.module = module
        self.parent: dict[Axis, Axis] = {}
        self.frozen: set[Axis] = set()
        self.packed: set[Axis] = set()  # along which blocks of weights lie
        self.floors: dict[Axis, int] = {}  # of axes whose class has one of its own
        self.numbers: list[
            tuple[Axis, int]
        ] = []  # what must be divided along with an axis, its own extent included
        self.products: list[tuple[list[Axis], list[Axis]]] = []
        for graph in module.functions.values():
            for node in graph.nodes:
                self._node(node)
        self._tensors_read_twice()

    def root(self, axis: Axis) -> Axis:
        if axis not in self.parent:
            self.parent[axis] = axis
            extent = axis[0].shape[axis[1]]
            if isinstance(extent, int):
                self.numbers.append((axis, extent))
                if axis[0].tensor.is_quantized and axis[1] == axis[0].tensor.rank - 1:
                    self.packed.add(axis)
            else:
                self.frozen.add(axis)
        while self.parent[axis] != axis:
            self.parent[axis] = self.parent[self.parent[axis]]
            axis = self.parent[axis]
        return axis

    def same(self, *axes: Axis) -> None:
        first = self.root(axes[0])
        for other in axes[1:]:
            self.parent[self.root(other)] = first

    def freeze(self, *values: Value | None) -> None:
        for value in values:
            if value is not None and isinstance(value.type, TensorType):
                for axis in range(value.tensor.rank):
                    self.root((value, axis))
                    self.frozen.add((value, axis))

    def alike(self, a: Value, b: Value, skip: Iterable[int] = ()) -> None:
        """Axes of equal extent, counted from the last, are one; an axis of 1 is broadcast."""
        for back in range(1, min(a.tensor.rank, b.tensor.rank) + 1):
            i, j = a.tensor.rank - back, b.tensor.rank - back
            if i not in skip and a.shape[i] == b.shape[j] and a.shape[i] != 1:
                self.same((a, i), (b, j))

    def _node(self, node: Node) -> None:
        for value in node.outputs:
            if isinstance(value.type, TensorType):
                for axis in range(value.tensor.rank):
                    self.root((value, axis))
        rule = getattr(self, f"_{node.op}", None)
        if rule is not None:
            rule(node)
        elif node.op in UNARY or node.op in BINARY or node.op in _ELEMENTWISE:
            for value in node.operands:
                self.alike(node.outputs[0], value)
        elif node.op in ALONG_AXIS:
            self._along(node)
        else:
            self.freeze(*node.inputs, *node.outputs)

    def _along(self, node: Node) -> None:
        x, y, axis = node.operand(0), node.outputs[0], axis_of(node)
        places = [i for i in range(x.tensor.rank) if i != axis or x.tensor.rank == y.tensor.rank]
        for i, j in zip(places, range(y.tensor.rank), strict=True):
            if x.shape[i] == y.shape[j]:
                self.same((x, i), (y, j))

    def _linear(self, node: Node) -> None:
        x, weight, y = node.operand(0), node.operand(1), node.output
        last = x.tensor.rank - 1
        self.same((x, last), (weight, 1))
        self.same((y, last), (weight, 0))
        if (bias := node.input(2)) is not None:
            self.same((bias, 0), (weight, 0))
        for i in range(last):
            self.same((x, i), (y, i))

    def _embedding(self, node: Node) -> None:
        ids, table, y = node.operand(0), node.operand(1), node.output
        self.floors[table, 0] = FLOORS["table"]  # it may be one of positions
        self.same((table, 1), (y, y.tensor.rank - 1))
        for i in range(ids.tensor.rank):
            self.same((ids, i), (y, i))

    def _rms_norm(self, node: Node) -> None:
        for value in node.operands:
            self.alike(node.output, value)

    _layer_norm = _rms_norm

    def _rotary_table(self, node: Node) -> None:
        positions, freq = node.operand(0), node.operand(1)
        for value in node.outputs:
            self.same((freq, 0), (value, value.tensor.rank - 1))
            for i in range(positions.tensor.rank):
                self.same((positions, i), (value, i))

    def _rope(self, node: Node) -> None:
        x, last = node.operand(0), node.operand(0).tensor.rank - 1
        self.alike(node.output, x)
        for table in node.operands[1:]:
            self.same((x, last), (table, table.tensor.rank - 1))

    def _attention(self, node: Node) -> None:
        q, k, v, y = node.operand(0), node.operand(1), node.operand(2), node.output
        self.same(
            (q, 1), (k, 1), (v, 1), (y, 1), *(((node.operand(3), 0),) if node.input(3) is not None else ())
        )
        self.same((q, 2), (k, 2), (v, 2), (y, 2))
        for value in (q, k, v):
            self.floors[value, 1], self.floors[value, 2] = FLOORS["heads"], FLOORS["dim"]

    def _experts(self, node: Node) -> None:
        x, gate_up, down = node.operand(0), node.operand(3), node.operand(4)
        self.freeze(node.operand(1), node.operand(2))
        self.same((x, 1), (node.output, 1), (gate_up, 2), (down, 1))
        self.same((gate_up, 1), (down, 2))
        self.same((x, 0), (node.output, 0))
        biases = [(v, axis) for v, axis in ((node.input(5), gate_up), (node.input(6), down)) if v is not None]
        for bias, weight in biases:
            self.same((bias, 1), (weight, 1))
        for value in (gate_up, down, *(b for b, _ in biases)):
            self.root((value, 0))
            self.frozen.add((value, 0))

    def _topk(self, node: Node) -> None:
        self.freeze(node.operand(0), *node.outputs)

    def _matmul(self, node: Node) -> None:
        a, b, y = node.operand(0), node.operand(1), node.output
        self.same((a, a.tensor.rank - 1), (b, b.tensor.rank - 2))
        self.same((a, a.tensor.rank - 2), (y, y.tensor.rank - 2))
        self.same((b, b.tensor.rank - 1), (y, y.tensor.rank - 1))
        for value in (a, b):
            self.alike(y, value, skip=(y.tensor.rank - 1, y.tensor.rank - 2))

    def _permute(self, node: Node) -> None:
        for to, axis in enumerate(node.integers("order")):
            self.same((node.operand(0), axis), (node.output, to))

    def _expand(self, node: Node) -> None:
        self.alike(node.output, node.operand(0))

    def _full(self, node: Node) -> None:
        """Its shape is an attribute, which follows the result's."""

    def _gather_rows(self, node: Node) -> None:
        x, y = node.operand(0), node.output
        for i in range(1, x.tensor.rank):
            self.same((x, i), (y, i))

    def _slice(self, node: Node) -> None:
        x, y, axis = node.operand(0), node.output, axis_of(node)
        for i in range(x.tensor.rank):
            self.same((x, i), (y, i))
        for name in ("start", "stop"):
            number = node.attrs[name]
            if isinstance(number, int):
                self.numbers.append(((x, axis), number))
        if node.integer("step", 1) != 1:
            self.frozen.add((x, axis))

    def _concat(self, node: Node) -> None:
        for value in node.operands:
            for i in range(value.tensor.rank):
                self.same((value, i), (node.output, i))

    def _reshape(self, node: Node) -> None:
        x, y = node.operand(0), node.output
        for left, right in _segments(x.shape, y.shape):
            a, b = [(x, i) for i in left], [(y, i) for i in right]
            if len(a) == len(b) == 1:
                self.same(a[0], b[0])
            elif any(not isinstance(v.shape[i], int) for v, i in (*a, *b)):
                for axis in (*a, *b):
                    self.root(axis)
                    self.frozen.add(axis)
            else:
                self.products.append((a, b))

    def _call(self, node: Node) -> None:
        callee = self.module.functions[node.fn]
        pairs = [
            *zip(node.inputs, callee.inputs, strict=True),
            *zip(node.outputs, callee.outputs, strict=True),
        ]
        for given, wanted in pairs:
            if given is not None and isinstance(wanted.type, TensorType):
                for i in range(wanted.tensor.rank):
                    self.same((given, i), (wanted, i))

    _group = _call

    def _tensors_read_twice(self) -> None:
        """A tensor of the checkpoint has one shape, whoever reads it."""
        first: dict[str, Value] = {}
        bound = [("", self.module.main), *((c.text("params", ""), g) for c, g in self.module.calls())]
        for prefix, graph in bound:
            for param in graph.params:
                name = _read_name(param.recipe, prefix)
                other = first.setdefault(name, param.value)
                for i in range(param.value.tensor.rank):
                    self.same((other, i), (param.value, i))

    def solve(self) -> dict[Axis, int]:
        """The power of two that each axis is divided by: the largest that nothing forbids."""
        floors: dict[Axis, int] = {}
        for axis, floor in self.floors.items():
            floors[self.root(axis)] = min(floor, floors.get(self.root(axis), floor))
        blocks = {self.root(axis) for axis in self.packed}
        most: dict[Axis, int] = {}
        for axis, number in self.numbers:
            root = self.root(axis)
            room = _twos(number)
            if number == axis[0].shape[axis[1]]:  # not the start or stop of a slice
                floor, whole = floors.get(root, FLOORS["other"]), 1
                if root in blocks:
                    floor, whole = max(floor, 2 * BLOCK), BLOCK
                while room and (number >> room < floor or (number >> room) % whole):
                    room -= 1
            most[root] = min(most.get(root, 64), room)
        for axis in self.frozen:
            most[self.root(axis)] = 0
        changed = True
        while changed:
            changed = False
            for left, right in self.products:
                a, b = ([self.root(x) for x in side] for side in (left, right))
                if sum(most[x] for x in a) != sum(most[x] for x in b):
                    larger = a if sum(most[x] for x in a) > sum(most[x] for x in b) else b
                    most[max(larger, key=lambda x: most[x])] -= 1
                    changed = True
        return {axis: most[self.root(axis)] for axis in self.parent}


_ELEMENTWISE = frozenset(("where", "cast", "gated_act", "softcap"))


def _twos(number: int) -> int:
    return (number & -number).bit_length() - 1 if number else 64


def _segments(a: tuple[Dim, ...], b: tuple[Dim, ...]) -> Iterator[tuple[list[int], list[int]]]:
    """Neighbouring axes of two shapes with equal products, as short as possible; axes of 1 belong to none."""
    names = sorted(set().union(*map(free_dims, (*a, *b))))
    primes = dict(zip(names, (10007, 10009, 10037, 10039, 10061, 10067), strict=False))
    left = [(i, _count(d, primes)) for i, d in enumerate(a) if d != 1]
    right = [(i, _count(d, primes)) for i, d in enumerate(b) if d != 1]
    while left or right:
        group: tuple[list[int], list[int]] = ([], [])
        products = [1, 1]
        while products[0] != products[1] or not group[0] or not group[1]:
            side = 0 if (products[0] <= products[1] and left) or not right else 1
            axis, extent = (left, right)[side].pop(0)
            group[side].append(axis)
            products[side] *= extent
        yield group


def _count(extent: Dim, primes: dict[str, int]) -> int:
    number = substitute(extent, dict(primes))
    assert isinstance(number, int)
    return number


def _read_name(recipe: Recipe, prefix: str = "") -> str:
    name = recipe.name if isinstance(recipe, Read) else print_recipe(recipe)
    return f"{prefix}.{name}" if prefix else name


class _Small:
    """The module with divided sizes."""

    def __init__(self, module: Module, by: dict[Axis, int]) -> None:
        self.old, self.by = module, by
        self.values: dict[Value, Value] = {}
        windows = {
            n.integer("window", 0) for g in module.functions.values() for n in g.nodes if n.op == "attention"
        }
        self.windows = {w: min(w, WINDOW + i) for i, w in enumerate(sorted(windows - {0}))} | {0: 0}

    def module(self) -> Module:
        return Module({n: self._graph(g) for n, g in self.old.functions.items()}, self.old.attrs)

    def _graph(self, g: Graph) -> Graph:
        return Graph(
            g.name, g.dims, tuple(map(self._value, g.inputs)), tuple(map(self._param, g.params)), g.states,
            tuple(map(self._node, g.nodes)), tuple(map(self._value, g.outputs)),
        )  # fmt: skip

    def _value(self, value: Value) -> Value:
        if value not in self.values:
            self.values[value] = Value(value.name, self._type(value))
        return self.values[value]

    def _type(self, value: Value) -> Type:
        if not isinstance(value.type, TensorType):
            return value.type
        return value.tensor.with_shape(
            *(d >> self.by.get((value, i), 0) if isinstance(d, int) else d for i, d in enumerate(value.shape))
        )

    def _param(self, param: Param) -> Param:
        value = self._value(param.value)
        recipe = param.recipe
        if isinstance(recipe, Literal):
            if recipe.shape != value.shape:
                recipe = _thinned(recipe, tuple(int(d) for d in value.shape))
        elif not isinstance(recipe, Read):
            recipe = Read(print_recipe(recipe))
        return Param(value, recipe)

    def _node(self, node: Node) -> Node:
        attrs: dict[str, Attr] = dict(node.attrs)
        outputs = tuple(map(self._value, node.outputs))
        if "shape" in attrs:
            attrs["shape"] = outputs[0].shape
        if node.op == "slice":
            by = self.by.get((node.operand(0), axis_of(node)), 0)
            attrs |= {k: v >> by for k in ("start", "stop") if isinstance(v := attrs[k], int)}
        if node.op == "attention" and "window" in attrs:
            attrs["window"] = self.windows[node.integer("window")]
        inputs = tuple(None if v is None else self._value(v) for v in node.inputs)
        return Node(node.op, inputs, attrs, outputs, node.origin)


def _thinned(recipe: Literal, shape: tuple[int, ...]) -> Literal:
    """Every so many entries of each axis."""
    import numpy as np

    values = np.array(recipe.values).reshape(recipe.shape)
    for axis, (old, new) in enumerate(zip(recipe.shape, shape, strict=True)):
        values = values.take(range(0, old, old // new), axis)
    return Literal(recipe.dtype, shape, tuple(float(v) for v in values.ravel()))
