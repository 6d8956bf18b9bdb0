"""The graph: values, nodes with origin, functions, and the module that calls one function per layer kind.

Everything here is immutable. Values and nodes have identity (two equal-looking values are two values); a pass builds a
new graph, sharing what did not change. Insertion order is execution order, so state reads and writes need no tokens.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import TypeAlias

from compilerllm.ir import attributes
from compilerllm.ir.dims import Dim, dim
from compilerllm.ir.errors import InvalidGraph
from compilerllm.ir.recipe import Read, Recipe, rename
from compilerllm.ir.types import StateType, TensorType, Type


@dataclass(frozen=True)
class FuncRef:
    """A function of the same module, as an attribute. Text: ``@layer``."""

    name: str

    def __str__(self) -> str:
        return f"@{self.name}"


Attr: TypeAlias = bool | int | float | str | Dim | FuncRef | tuple["Attr", ...]


@dataclass(frozen=True)
class Origin:
    """Where a node comes from: module path in the model, source ops, passes that touched it, oldest first."""

    path: str = ""
    ops: tuple[str, ...] = ()
    passes: tuple[str, ...] = ()

    def touched(self, by: str) -> "Origin":
        """The same origin with pass ``by`` noted as the last that touched it."""
        return self if by in self.passes else replace(self, passes=(*self.passes, by))

    @staticmethod
    def merge(*origins: "Origin") -> "Origin":
        """The origin of a node that replaces several: their longest common path, all ops, all passes."""
        paths = [o.path.split(".") for o in origins if o.path]
        common: list[str] = []
        for parts in zip(*paths, strict=False):
            if len(set(parts)) > 1:
                break
            common.append(parts[0])
        ops = dict.fromkeys(op for o in origins for op in o.ops)
        passes = dict.fromkeys(p for o in origins for p in o.passes)
        return Origin(".".join(common), tuple(ops), tuple(passes))


NOWHERE = Origin()


@dataclass(frozen=True, eq=False)
class Value:
    """One SSA value. ``name`` is unique in its function and printed as ``%name``."""

    name: str
    type: Type

    @property
    def tensor(self) -> TensorType:
        """Its tensor type. Raises ``InvalidGraph`` for states and step metadata."""
        if not isinstance(self.type, TensorType):
            raise InvalidGraph(f"%{self.name} is a {self.type}, not a tensor")
        return self.type

    @property
    def state(self) -> StateType:
        """Its state type. Raises ``InvalidGraph`` for anything else."""
        if not isinstance(self.type, StateType):
            raise InvalidGraph(f"%{self.name} is a {self.type}, not a state")
        return self.type

    @property
    def shape(self) -> tuple[Dim, ...]:
        """Extents of a tensor, outermost first."""
        return self.tensor.shape

    @property
    def dtype(self) -> str:
        """A tensor's IR dtype."""
        return self.tensor.dtype

    def __repr__(self) -> str:
        return f"%{self.name}: {self.type}"


@dataclass(frozen=True, eq=False)
class Node:
    """One operation. ``inputs`` follow the op's signature; an absent optional operand is None (trailing ones cut)."""

    op: str
    inputs: tuple[Value | None, ...]
    attrs: Mapping[str, Attr]
    outputs: tuple[Value, ...]
    origin: Origin = NOWHERE

    def __post_init__(self) -> None:
        inputs = self.inputs
        while inputs and inputs[-1] is None:
            inputs = inputs[:-1]
        object.__setattr__(self, "inputs", inputs)
        clean = {k: dim(v) if hasattr(v, "free_symbols") else v for k, v in self.attrs.items()}
        object.__setattr__(self, "attrs", MappingProxyType(clean))

    @property
    def output(self) -> Value:
        """The only output. Raises ``InvalidGraph`` when there are several or none."""
        if len(self.outputs) != 1:
            raise InvalidGraph(f"{self.op} has {len(self.outputs)} outputs, not one")
        return self.outputs[0]

    @property
    def operands(self) -> tuple[Value, ...]:
        """The inputs that are present."""
        return tuple(v for v in self.inputs if v is not None)

    def input(self, index: int) -> Value | None:
        """Operand at ``index`` of the signature, or None when it was left out."""
        return self.inputs[index] if index < len(self.inputs) else None

    def operand(self, index: int) -> Value:
        """Operand at ``index`` of the signature. Raises ``InvalidGraph`` when it was left out."""
        value = self.input(index)
        if value is None:
            raise InvalidGraph(f"{self!r} lacks operand {index}")
        return value

    def attr(self, name: str, default: Attr | None = None) -> Attr:
        """The attribute, or ``default``. Raises ``InvalidGraph`` when there is neither."""
        value = self.attrs.get(name, default)
        if value is None:
            raise InvalidGraph(f"{self.op} has no attribute {name!r}")
        return value

    # Readers for attributes of one kind; each raises ``InvalidGraph`` for any other.

    def integer(self, name: str, default: int | None = None) -> int:
        return attributes.integer(self.op, self.attrs, name, default)

    def integers(self, name: str) -> tuple[int, ...]:
        return attributes.integers(self.op, self.attrs, name)

    def number(self, name: str, default: float | None = None) -> float:
        return attributes.number(self.op, self.attrs, name, default)

    def text(self, name: str, default: str | None = None) -> str:
        return attributes.text(self.op, self.attrs, name, default)

    def dimension(self, name: str) -> Dim:
        return attributes.dimension(self.op, self.attrs, name)

    def dimensions(self, name: str) -> tuple[Dim, ...]:
        return attributes.dimensions(self.op, self.attrs, name)

    @property
    def fn(self) -> str:
        """The function this node calls (``call`` and ``group``)."""
        ref = self.attr("fn")
        if not isinstance(ref, FuncRef):
            raise InvalidGraph(f"{self.op}: attribute 'fn' must name a function, but is {ref!r}")
        return ref.name

    def __repr__(self) -> str:
        outs = ", ".join(f"%{v.name}" for v in self.outputs)
        ins = ", ".join("none" if v is None else f"%{v.name}" for v in self.inputs)
        return f"{outs} = {self.op}({ins})" if outs else f"{self.op}({ins})"


@dataclass(frozen=True)
class DimDecl:
    """A dimension a function's types may use: ``dim T in [low, high]``."""

    name: str
    low: int
    high: int


@dataclass(frozen=True, eq=False)
class Param:
    """A weight of a function. Without a recipe of its own it is read under its own name."""

    value: Value
    recipe: Recipe

    @staticmethod
    def read(name: str, type: TensorType) -> "Param":
        """A parameter read under its own name."""
        return Param(Value(name, type), Read(name))

    @property
    def name(self) -> str:
        return self.value.name


@dataclass(frozen=True, eq=False)
class Graph:
    """A function: dims, inputs, params, states, nodes in execution order, outputs."""

    name: str
    dims: tuple[DimDecl, ...]
    inputs: tuple[Value, ...]
    params: tuple[Param, ...]
    states: tuple[Value, ...]
    nodes: tuple[Node, ...]
    outputs: tuple[Value, ...]

    def values(self) -> Iterator[Value]:
        """Every value, each once, in definition order."""
        yield from self.inputs
        yield from (p.value for p in self.params)
        yield from self.states
        for node in self.nodes:
            yield from node.outputs

    def producers(self) -> dict[Value, Node]:
        """The node that makes each value (inputs, params and states have none)."""
        return {out: node for node in self.nodes for out in node.outputs}

    def uses(self) -> dict[Value, list[Node]]:
        """The nodes that take each value; a node that takes it twice is listed twice."""
        result: dict[Value, list[Node]] = {v: [] for v in self.values()}
        for node in self.nodes:
            for value in node.operands:
                result[value].append(node)
        return result

    def param(self, name: str) -> Param:
        """Raises ``InvalidGraph`` where there is none of that name."""
        for param in self.params:
            if param.name == name:
                return param
        raise InvalidGraph(f"function @{self.name} has no parameter %{name}")

    def dim(self, name: str) -> DimDecl:
        """Raises ``InvalidGraph`` where there is none of that name."""
        for decl in self.dims:
            if decl.name == name:
                return decl
        raise InvalidGraph(f"function @{self.name} has no dimension {name}")


def join_name(prefix: str, name: str) -> str:
    """A local name under a call's prefix; an empty prefix changes nothing."""
    return f"{prefix}.{name}" if prefix else name


@dataclass(frozen=True)
class ParamInstance:
    """A parameter as it is loaded: global name, type, recipe with global names."""

    name: str
    type: TensorType
    recipe: Recipe


@dataclass(frozen=True, eq=False)
class Module:
    """``main`` plus one function per layer kind (and per fused group), called with a prefix per layer."""

    functions: Mapping[str, Graph]
    attrs: Mapping[str, Attr] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "functions", MappingProxyType(dict(self.functions)))
        object.__setattr__(self, "attrs", MappingProxyType(dict(self.attrs)))

    @property
    def main(self) -> Graph:
        """The entry. Raises ``InvalidGraph`` where there is none."""
        if "main" not in self.functions:
            raise InvalidGraph("the module has no function @main")
        return self.functions["main"]

    def with_functions(self, *graphs: Graph) -> "Module":
        """The module with these functions added or replaced, by name."""
        return replace(self, functions={**self.functions, **{g.name: g for g in graphs}})

    def calls(self) -> Iterator[tuple[Node, Graph]]:
        """Calls of ``main`` to layer functions, in order."""
        for node in self.main.nodes:
            if node.op == "call":
                yield node, self.functions[node.fn]

    def param_instances(self) -> Iterator[ParamInstance]:
        """Every parameter of the model once, in the order of first use."""
        seen: set[str] = set()
        bound = [("", self.main)] + [(call.text("params", ""), graph) for call, graph in self.calls()]
        for prefix, graph in bound:
            for param in graph.params:
                name = join_name(prefix, param.name)
                if name not in seen:
                    seen.add(name)
                    recipe = rename(param.recipe, partial(join_name, prefix))
                    yield ParamInstance(name, param.value.tensor, recipe)

    def state_instances(self) -> Iterator[tuple[str, StateType]]:
        """Every state once, as (global name, type): ``kv.7`` for layer 7's ``kv``."""
        seen: set[str] = set()
        bound = [("", self.main)] + [(call.text("states", ""), graph) for call, graph in self.calls()]
        for suffix, graph in bound:
            for value in graph.states:
                name = state_name(value.name, suffix)
                if name not in seen:
                    seen.add(name)
                    yield name, value.state


def state_name(local: str, suffix: str) -> str:
    """A local state name under a call's suffix: ``kv`` and ``7`` give ``kv.7``."""
    return f"{local}.{suffix}" if suffix else local
