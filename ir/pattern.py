"""Pattern matching whose failures carry reasons.

A pattern is a small tree: ``P("add", P("linear", Any("x"), Any("w"), name="lin"), Any("r"), commutative=True)``.
Matching walks from a node towards its inputs and gives a ``Match`` (truthy) or a ``Mismatch`` (falsy) that says which
condition failed, so that a report can tell a kernel developer why something did not fuse.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from compilerllm.ir.graph import Attr, Graph, Node, Value


@dataclass(frozen=True)
class Any:
    """Binds any value to ``name``; the same name twice must be the same value. ``where`` may refuse with a reason."""

    name: str
    where: Callable[[Value], str | None] | None = None


@dataclass(frozen=True)
class Absent:
    """An optional operand that must not be there."""


@dataclass(frozen=True, init=False)
class P:
    """A node of op ``op`` (or any of several) whose inputs match in order.

    attrs: required values, or a predicate for a value. name: binds the node. single_use: the node's results are used
    once only, so fusing removes it (the root is not asked). commutative: the first two inputs may be swapped.
    output: which result of the node is matched.
    """

    ops: tuple[str, ...]
    inputs: tuple["Pattern", ...]
    attrs: Mapping[str, object]
    name: str | None
    single_use: bool
    commutative: bool
    output: int

    def __init__(
        self, op: str | tuple[str, ...], *inputs: "Pattern", attrs: Mapping[str, object] | None = None,
        name: str | None = None, single_use: bool = True, commutative: bool = False, output: int = 0,
    ) -> None:  # fmt: skip
        object.__setattr__(self, "ops", (op,) if isinstance(op, str) else op)
        object.__setattr__(self, "inputs", inputs)
        object.__setattr__(self, "attrs", attrs or {})
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "single_use", single_use)
        object.__setattr__(self, "commutative", commutative)
        object.__setattr__(self, "output", output)


Pattern = Any | Absent | P


@dataclass(frozen=True)
class Match:
    """Values and nodes by name, and all nodes covered, the root first."""

    root: Node
    values: Mapping[str, Value]
    named: Mapping[str, Node]
    nodes: tuple[Node, ...]

    def __getitem__(self, name: str) -> Value:
        return self.values[name]

    def node(self, name: str) -> Node:
        """The node that the pattern called ``name``."""
        return self.named[name]


@dataclass(frozen=True)
class Mismatch:
    """Why a pattern does not match. ``depth`` counts the nodes that did, so deeper means nearer to a match."""

    node: Node | None
    reason: str
    depth: int

    def __bool__(self) -> bool:
        return False


@dataclass
class _Attempt:
    values: dict[str, Value] = field(default_factory=dict)
    named: dict[str, Node] = field(default_factory=dict)
    nodes: list[Node] = field(default_factory=list)

    def fork(self) -> "_Attempt":
        return _Attempt(dict(self.values), dict(self.named), list(self.nodes))

    def take(self, other: "_Attempt") -> None:
        self.values, self.named, self.nodes = other.values, other.named, other.nodes


class Matcher:
    """Matches patterns in one graph (its producers and uses are looked up once)."""

    def __init__(self, graph: Graph) -> None:
        self.producers = graph.producers()
        self.uses = graph.uses()
        self.outputs = frozenset(graph.outputs)

    def match(self, pattern: P, root: Node) -> Match | Mismatch:
        """Match ``pattern`` with ``root`` as its last node."""
        attempt = _Attempt()
        failed = self._node(pattern, root, attempt, is_root=True)
        if failed is not None:
            return failed
        return Match(root, attempt.values, attempt.named, tuple(attempt.nodes))

    def used_once(self, value: Value) -> bool:
        """Whether exactly one node takes the value and the function does not return it."""
        return len(self.uses[value]) == 1 and value not in self.outputs

    def who_else(self, value: Value, taker: Node | None) -> str:
        """For a reason: "%h is also read by mul and pow, and returned", beside ``taker``."""
        others = list(dict.fromkeys(n.op for n in self.uses[value] if n is not taker))
        if self.uses[value].count(taker) > 1 and taker is not None:  # type: ignore[arg-type]
            others.append(f"{taker.op} once more")
        read = f"is also read by {' and '.join(others)}" if others else ""
        returned = "is returned" if value in self.outputs else ""
        return f"%{value.name} {', and '.join(part for part in (read, returned) if part)}"

    def _node(self, pattern: P, node: Node, attempt: _Attempt, is_root: bool = False) -> Mismatch | None:
        depth = len(attempt.nodes)
        if node.op not in pattern.ops:
            return Mismatch(node, f"{node.op} stands where {' or '.join(pattern.ops)} is needed", depth)
        for key, wanted in pattern.attrs.items():
            if (why := _attr_mismatch(node, key, wanted)) is not None:
                return Mismatch(node, why, depth)
        if not is_root and pattern.single_use:
            for value in node.outputs:
                if len(self.uses[value]) + (value in self.outputs) > 1:
                    taker = attempt.nodes[-1] if attempt.nodes else None
                    return Mismatch(node, self.who_else(value, taker), depth)
        attempt.nodes.append(node)
        if pattern.name is not None:
            attempt.named[pattern.name] = node
        return self._inputs(pattern, node, attempt)

    def _inputs(self, pattern: P, node: Node, attempt: _Attempt) -> Mismatch | None:
        first = attempt.fork()
        failed = self._ordered(pattern.inputs, node, node.inputs, first)
        if failed is None:
            attempt.take(first)
            return None
        if pattern.commutative and len(node.inputs) >= 2:
            second = attempt.fork()
            swapped = (node.inputs[1], node.inputs[0], *node.inputs[2:])
            failed_swapped = self._ordered(pattern.inputs, node, swapped, second)
            if failed_swapped is None:
                attempt.take(second)
                return None
            return max(failed, failed_swapped, key=lambda m: m.depth)
        return failed

    def _ordered(
        self, patterns: tuple[Pattern, ...], node: Node, inputs: tuple[Value | None, ...], attempt: _Attempt
    ) -> Mismatch | None:
        for index, wanted in enumerate(patterns):
            value = inputs[index] if index < len(inputs) else None
            failed = self._value(wanted, value, node, attempt)
            if failed is not None:
                return failed
        if len(inputs) > len(patterns):
            return Mismatch(
                node, f"{node.op} has {len(inputs)} operands, the pattern {len(patterns)}", len(attempt.nodes)
            )
        return None

    def _value(self, wanted: Pattern, value: Value | None, user: Node, attempt: _Attempt) -> Mismatch | None:
        depth = len(attempt.nodes)
        if isinstance(wanted, Absent):
            return (
                None
                if value is None
                else Mismatch(user, f"{user.op} has operand %{value.name}, which must be absent", depth)
            )
        if value is None:
            return Mismatch(user, f"{user.op} lacks an operand", depth)
        if isinstance(wanted, Any):
            known = attempt.values.setdefault(wanted.name, value)
            if known is not value:
                return Mismatch(user, f"%{value.name} stands where %{known.name} is needed", depth)
            why = wanted.where(value) if wanted.where else None
            return None if why is None else Mismatch(user, why, depth)
        producer = self.producers.get(value)
        if producer is None:
            return Mismatch(
                user, f"%{value.name} is no node's result, {' or '.join(wanted.ops)} is needed", depth
            )
        if producer.outputs[wanted.output] is not value:
            return Mismatch(producer, f"%{value.name} is another result of {producer.op} than needed", depth)
        return self._node(wanted, producer, attempt)


def _attr_mismatch(node: Node, key: str, wanted: object) -> str | None:
    value: Attr | None = node.attrs.get(key)
    if callable(wanted):
        return None if wanted(value) else f"{node.op}: attribute {key}={value!r} is not accepted"
    return None if value == wanted else f"{node.op}: attribute {key} is {value!r}, {wanted!r} is needed"
