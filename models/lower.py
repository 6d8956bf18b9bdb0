"""From a functionalised FX graph to the IR: values, symbolic shapes, parameters, and one rule per operator.

Rules stand in ``rules_pointwise``, ``rules_shape`` and ``rules_model``. An operator without a rule, or one whose rule
refuses its arguments, becomes an opaque ``aten`` node, so that whatever torch can run still runs.

How an ``aten`` node holds its arguments: ``target`` is the operator with its overload (``"aten.sort.default"``),
``args`` a tuple of templates, ``kwargs`` (absent when empty) a tuple of ``(name, template)`` pairs. A template is

    "%2"          operand 2 of the node              "none"       None
    "dtype:bf16"  a dtype, by its IR name            "text:sum"   a string
    1, 0.5, true  numbers as they are                T + 1        a symbolic size
    (1, "%0")     a list of templates

Devices, layouts and memory formats are left out. The node has one output per tensor the operator gives.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from compilerllm.ir.builder import Builder, prune
from compilerllm.ir.dims import Dim
from compilerllm.ir.errors import TypeMismatch
from compilerllm.ir.graph import Attr, Graph, Origin, Value
from compilerllm.ir.recipe import Literal, Permute, Read, Recipe
from compilerllm.ir.types import TensorType
from compilerllm.models.errors import UnsupportedOperator
from compilerllm.models.shapes import Shapes, bounds, dtype_name

MAX_LITERAL = 1 << 20  # elements of a constant that may be written into a graph


@dataclass(frozen=True)
class Scalar:
    """A rank-0 constant: folded into the nodes that use it."""

    value: bool | int | float
    dtype: str


@dataclass(frozen=True)
class Source:
    """A tensor that a graph does not compute: ``name`` in the function, its recipe there, its packed type if any.

    ``constant`` holds the numbers of a tensor no checkpoint stores.
    """

    name: str
    recipe: Recipe
    packed: str | None = None
    constant: torch.Tensor | None = None


Result = Value | Scalar | tuple["Result | None", ...]
Rule = Callable[["Lowering", fx.Node], "Result | None"]
RULES: dict[str, Rule] = {}


def rule(*targets: str) -> Callable[[Rule], Rule]:
    """Register a lowering; a rule that returns None refuses, and the node stays opaque."""

    def register(function: Rule) -> Rule:
        for target in targets:
            if target in RULES:
                raise ValueError(f"{target} has two rules")
            RULES[target] = function
        return function

    return register


class Lowering:
    """Lowers FX nodes into one builder. ``env`` says what stands for each FX node."""

    def __init__(self, builder: Builder, shapes: Shapes, *, opaque: bool = True, strip: str = "") -> None:
        self.b, self.shapes, self.opaque, self.strip = builder, shapes, opaque, strip
        self.env: dict[fx.Node, Result] = {}
        self.sources: dict[fx.Node, Source] = {}
        self.untransposed: dict[Value, Value] = {}  # value -> the matrix it is the transpose of
        self.opaque_targets: dict[str, int] = {}

    # What rules ask

    def arg(self, node: fx.Node, index: int, name: str = "", default: Any = None) -> Any:
        """An argument by position or name, as FX holds it."""
        if index < len(node.args):
            return node.args[index]
        return node.kwargs.get(name, default) if name else default

    def operand(self, argument: Any) -> "Value | Scalar":
        """What stands for an argument: a value, or a constant for numbers."""
        if isinstance(argument, fx.Node):
            return self._node_operand(argument)
        if isinstance(argument, bool):
            return Scalar(argument, "bool")
        if isinstance(argument, int | float):
            return Scalar(argument, "i64" if isinstance(argument, int) else "f32")
        raise UnsupportedOperator(f"argument {argument!r} is no tensor and no number")

    def _node_operand(self, node: fx.Node) -> "Value | Scalar":
        if node not in self.env:
            self.env[node] = self._source(node)
        result = self.env[node]
        if isinstance(result, tuple):
            raise UnsupportedOperator(f"{node.name} gives several values where one is needed")
        return result

    def value(self, argument: Any) -> Value:
        """As ``operand``, with constants made tensors."""
        found = self.operand(argument)
        if isinstance(found, Scalar):
            return self.b.emit("full", shape=(), value=found.value, dtype=found.dtype)
        return found

    def type(self, node: fx.Node, index: int | None = None) -> TensorType:
        """The type torch gave a node's result (its ``index``-th, where it has several)."""
        val = node.meta["val"]
        return self.shapes.type(val if index is None else val[index])

    def weight(self, argument: fx.Node) -> Value:
        """A parameter as a matrix operand: packed where the checkpoint has it packed and that was asked for."""
        source = self.sources.get(argument)
        if source is None or source.packed is None:
            return self.value(argument)
        return self.b.param(source.name, self.type(argument).with_dtype(source.packed), source.recipe)

    def permuted(self, argument: fx.Node, order: tuple[int, ...]) -> Value:
        """A tensor with its axes reordered: by its recipe where it is a parameter, else by a node."""
        source = self.sources.get(argument)
        if source is None or source.constant is not None or argument in self.env:
            return self.b.emit("permute", self.value(argument), order=order)
        found = self.type(argument)
        turned = found.with_shape(*(found.shape[i] for i in order))
        return self.b.param(source.name, turned, Permute(source.recipe, order))

    # Sources

    def _source(self, node: fx.Node) -> "Value | Scalar":
        source = self.sources.get(node)
        if source is None:
            raise UnsupportedOperator(f"{node.name} is used before it is defined")
        if source.constant is None:
            return self.b.param(source.name, self.type(node), source.recipe)
        constant = source.constant
        if constant.numel() > MAX_LITERAL:
            raise UnsupportedOperator(
                f"constant {source.name} has {constant.numel()} elements; at most {MAX_LITERAL} fit into a graph"
            )
        kind = dtype_name(constant.dtype)
        if constant.dim() == 0:
            return Scalar(constant.item(), kind)
        flat = tuple(float(v) for v in constant.double().flatten().tolist())
        return self.b.param(
            source.name, TensorType(kind, tuple(constant.shape)), Literal(kind, tuple(constant.shape), flat)
        )

    # Nodes

    def run(self, node: fx.Node) -> None:
        """Lower one ``call_function`` node (sizes and assertions lower to nothing)."""
        if node.op != "call_function":
            raise UnsupportedOperator(
                f"FX node {node.name} is a {node.op}; only functionalised graphs can be lowered"
            )
        if not isinstance(node.meta.get("val"), torch.Tensor | tuple | list):
            return
        target = str(node.target)
        if target == "<built-in function getitem>":
            picked = self.env[self.arg(node, 0)]
            assert isinstance(picked, tuple)
            found = picked[self.arg(node, 1)]
            if found is None:
                raise UnsupportedOperator(f"{node.name} takes a result of {node.args[0]} that is no tensor")
            self.env[node] = found
            return
        self.b.origin = Origin(self.path(node), (target,))
        self.env[node] = self._lower(node, target)

    def path(self, node: fx.Node) -> str:
        """The module a node was traced in, relative to the function's own."""
        stack = node.meta.get("nn_module_stack") or {}
        path = next(reversed(stack.values()))[0] if stack else ""
        path = str(path).removeprefix("model_.").removeprefix("model_")
        if self.strip and (path == self.strip or path.startswith(self.strip + ".")):
            path = path[len(self.strip) + 1 :]
        return path

    def _lower(self, node: fx.Node, target: str) -> Result:
        function = RULES.get(target)
        if function is not None:
            try:
                result = function(self, node)
            except TypeMismatch:  # the op's rule knows better than ours which operands it can take
                result = None
            if result is not None and self._typed(node, result):
                return result
        if not self.opaque:
            raise UnsupportedOperator(
                f"{target} (at {self.path(node) or 'top level'}) has no lowering for {self._types(node)}; allow opaque "
                "operators to run it through torch"
            )
        self.opaque_targets[target] = self.opaque_targets.get(target, 0) + 1
        return self._opaque(node, target)

    def _types(self, node: fx.Node) -> str:
        return (
            ", ".join(str(self.shapes.type(n.meta["val"])) for n in node.all_input_nodes if _is_tensor(n))
            or "no tensors"
        )

    def _typed(self, node: fx.Node, result: Result) -> bool:
        """Whether a rule's result has the types torch inferred."""
        if isinstance(result, Value):
            return result.type == self.type(node)
        if isinstance(result, tuple):
            return all(
                r is None or (isinstance(r, Value) and r.type == self.type(node, i))
                for i, r in enumerate(result)
            )
        return True

    def _opaque(self, node: fx.Node, target: str) -> Result:
        operands: list[Value] = []

        def template(argument: Any) -> Attr:
            match argument:
                case None | torch.device() | torch.layout() | torch.memory_format():
                    return "none"
                case torch.dtype():
                    return f"dtype:{dtype_name(argument)}"
                case bool() | int() | float():
                    return argument
                case str():
                    return f"text:{argument}"
                case tuple() | list():
                    return tuple(template(a) for a in argument)
                case fx.Node() if not _is_tensor(argument):
                    return self.shapes.dim(argument.meta["val"])
                case fx.Node():
                    operands.append(self.value(argument))
                    return f"%{len(operands) - 1}"
            if isinstance(argument, torch.SymInt):
                return self.shapes.dim(argument)
            raise UnsupportedOperator(
                f"{target}: argument {argument!r} of type {type(argument).__name__} cannot be kept"
            )

        dropped = ("device", "layout", "pin_memory", "memory_format")
        args = tuple(template(a) for a in node.args)
        kwargs = tuple((k, template(v)) for k, v in node.kwargs.items() if v is not None and k not in dropped)
        attrs: dict[str, Any] = {"target": target, "args": args} | ({"kwargs": kwargs} if kwargs else {})
        val = node.meta["val"]
        several = isinstance(val, tuple | list)
        tensors = [v for v in (val if several else [val]) if isinstance(v, torch.Tensor)]
        hint = target.split(".")[-2]
        outputs = self.b.emit_many(
            "aten", *operands, types=[self.shapes.type(t) for t in tensors], name=hint, **attrs
        )
        if not several:
            return outputs[0]
        rest = iter(outputs)
        return tuple(next(rest) if isinstance(v, torch.Tensor) else None for v in val)


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


@dataclass(frozen=True)
class LoweredFx:
    """One FX graph as a function of its own.

    inputs: names of the placeholders that became inputs (sizes do not). outputs: for each result of the FX graph the
    index of the graph's output, a size, a number, or None. dims: our name of each symbol, by torch's. constants: tensors
    the FX module holds, by the parameter's name. opaque: how often each operator stayed opaque.
    """

    graph: Graph
    inputs: tuple[str, ...]
    outputs: tuple["OutputSlot | Dim | float | None", ...]
    dims: Mapping[str, str]
    constants: Mapping[str, torch.Tensor] = field(default_factory=dict)
    opaque: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class OutputSlot:
    """A tensor result: its place among the graph's outputs."""

    index: int


def lower_fx(
    gm: fx.GraphModule, *, name: str = "main", opaque: bool = True, dims: Mapping[str, str] | None = None
) -> LoweredFx:
    """Lower a functionalised FX graph whose nodes carry fake values in ``meta["val"]`` (AOTAutograd's, export's).

    Tensor placeholders become inputs, ``get_attr`` tensors parameters, sizes dimensions. ``dims`` names torch's
    symbols. Without ``opaque`` an operator that has no lowering raises ``UnsupportedOperator``.
    """
    load_rules()
    builder, shapes = Builder(name), Shapes(dims)
    low = Lowering(builder, shapes, opaque=opaque)
    inputs: list[str] = []
    constants: dict[str, torch.Tensor] = {}
    slots: list[OutputSlot | Dim | float | None] = []
    results: list[Value] = []
    used = _live(gm.graph)
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            if _is_tensor(node):
                low.env[node] = builder.input(node.name, shapes.type(node.meta["val"]))
                inputs.append(node.name)
            elif node.meta.get("val") is not None:
                shapes.dim(node.meta["val"])
        elif node.op == "get_attr":
            constants[str(node.target)] = tensor = _attribute(gm, str(node.target))
            low.sources[node] = Source(
                str(node.target), Read(str(node.target)), constant=tensor if tensor.dim() == 0 else None
            )
            node.meta.setdefault("val", tensor)
        elif node.op == "output":
            slots.extend(_output(low, result, results) for result in _flat(node.args[0]))
        elif node in used:
            low.run(node)
    _declare(builder, shapes, gm)
    graph = prune(builder.finish(*results))
    return LoweredFx(graph, tuple(inputs), tuple(slots), shapes.symbols, constants, low.opaque_targets)


def _attribute(gm: fx.GraphModule, target: str) -> torch.Tensor:
    found: Any = gm
    for part in target.split("."):
        found = getattr(found, part)
    if not isinstance(found, torch.Tensor):
        raise UnsupportedOperator(
            f"the graph holds {target}, a {type(found).__name__}; only tensors can be lowered"
        )
    return found


def _flat(result: Any) -> list[Any]:
    return [x for r in result for x in _flat(r)] if isinstance(result, tuple | list) else [result]


def _output(low: Lowering, result: Any, results: list[Value]) -> "OutputSlot | Dim | float | None":
    if result is None or isinstance(result, int | float):
        return result
    if isinstance(result, fx.Node) and not _is_tensor(result):
        return low.shapes.dim(result.meta["val"])
    results.append(low.value(result))
    return OutputSlot(len(results) - 1)


def _live(graph: fx.Graph) -> set[fx.Node]:
    """Nodes an output depends on. The graph is functionalised, so nothing else has a visible effect."""
    live: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if node.op == "output" or node in live:
            live.update(node.all_input_nodes)
    return live


def _declare(builder: Builder, shapes: Shapes, gm: fx.GraphModule) -> None:
    """Declare every symbol with the bounds the tracer knows."""
    env = next((v.node.shape_env for v in _symbolic_sizes(gm) if hasattr(v, "node")), None)
    for torch_name, ours in shapes.symbols.items():
        low, high = bounds(env, torch_name)
        builder.dim(ours, low, high)


def _symbolic_sizes(gm: fx.GraphModule) -> list[Any]:
    sizes: list[Any] = []
    for node in gm.graph.nodes:
        val = node.meta.get("val")
        if isinstance(val, torch.Tensor):
            sizes += [s for s in val.shape if isinstance(s, torch.SymInt)]
        elif isinstance(val, torch.SymInt):
            sizes.append(val)
    return sizes


def load_rules() -> Mapping[str, Rule]:
    """All lowering rules, by operator."""
    from compilerllm.models import rules_model, rules_pointwise, rules_shape

    assert rules_model and rules_pointwise and rules_shape
    return RULES
