"""Gather neighbouring pointwise nodes, with at most one row reduction among them, into functions run as one kernel.

Before::

    %a = cast(%x, dtype="f32") : f32[T, 8]
    %p = softmax(%a, axis=1) : f32[T, 8]
    %y = cast(%p, dtype="bf16") : bf16[T, 8]

After::

    func @group_0(%x: bf16[T, 8]) { %a = cast(%x, dtype="f32") ... return %y }
    %y = group(%x, fn=@group_0) : bf16[T, 8]

All nodes of a group work on the same rows: each result has the group's shape [..., W], or [..., 1] or [...] behind a
reduction over the last axis. Operands may broadcast. Every node rounds as it did. Equal groups share a function.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from compilerllm.ir.builder import Builder
from compilerllm.ir.dims import Dim, free_dims
from compilerllm.ir.graph import Attr, FuncRef, Graph, Module, Node, Origin, Value
from compilerllm.ir.op import lookup
from compilerllm.ir.text import print_graph
from compilerllm.passes.opinfo import POINTWISE, axis_of
from compilerllm.passes.report import PassReport

BY = "fuse_pointwise"
_ROW_OPS = frozenset(("softmax", "sum", "mean", "amax", "amin"))


def fuse_pointwise(module: Module, report: PassReport) -> Module:
    """Rewrite every function; the groups become functions ``group_0``, ``group_1`` ... of the module."""
    bodies: dict[str, str] = {}  # a body's text under a common name -> the function's name
    added: list[Graph] = []
    changed: list[Graph] = []
    taken = set(module.functions)
    bodies_of = {n.fn for g in module.functions.values() for n in g.nodes if n.op == "group"}
    for name, graph in module.functions.items():
        if name in bodies_of:
            continue
        groups = [g for g in _Grouping(graph, report).groups() if len(g.nodes) > 1]
        if not groups:
            continue
        refs = []
        for group in groups:
            body = body_of(group.nodes, group.inputs, group.outputs, graph, "body")
            text = print_graph(body)
            if text not in bodies:
                number = len(bodies)
                while f"group_{number}" in taken:
                    number += 1
                taken.add(f"group_{number}")
                bodies[text] = f"group_{number}"
                added.append(replace(body, name=bodies[text]))
            refs.append(bodies[text])
            report.match()
            report.count("groups")
            report.count("grouped nodes", len(group.nodes))
        changed.append(_replaced(graph, groups, refs))
    return module.with_functions(*changed, *added) if changed else module


@dataclass(eq=False)
class _Group:
    """Nodes that run together. ``rows`` and ``width`` are what its elements range over."""

    rows: tuple[Dim, ...]
    width: Dim
    nodes: list[Node] = field(default_factory=list)
    reductions: int = 0
    inputs: list[Value] = field(default_factory=list)
    outputs: list[Value] = field(default_factory=list)


class _Grouping:
    """Grows groups in execution order.

    A node joins the groups of its operands, which then become one, if no path leaves the group and comes back.
    """

    def __init__(self, graph: Graph, report: PassReport) -> None:
        self.graph, self.report = graph, report
        self.producers, self.uses = graph.producers(), graph.uses()
        self.group_of: dict[Node, _Group] = {}

    def groups(self) -> list[_Group]:
        order = {node: i for i, node in enumerate(self.graph.nodes)}
        for node in self.graph.nodes:
            space = _space(node)
            if space is None:
                continue
            group = _Group(*space, [node], int(node.op in _ROW_OPS))
            for near in self._near(node):
                if (why := self._not_joinable(near, group)) is None:
                    group = _Group(
                        near.rows, near.width, near.nodes + group.nodes, near.reductions + group.reductions
                    )
                elif len(near.nodes) > 1 or node.op in _ROW_OPS:
                    self.report.miss(node, why)
            self.group_of.update(dict.fromkeys(group.nodes, group))
        found = list(dict.fromkeys(self.group_of.values()))
        for group in found:
            group.nodes.sort(key=order.__getitem__)
            self._edges(group)
        return found

    def _near(self, node: Node) -> list[_Group]:
        """The groups of the operands; larger ones first."""
        makers = (self.producers.get(v) for v in node.operands)
        found = dict.fromkeys(self.group_of[m] for m in makers if m is not None and m in self.group_of)
        return sorted(found, key=lambda g: -len(g.nodes))

    def _not_joinable(self, near: _Group, group: _Group) -> str | None:
        if not _same_space(near, group):
            return f"it ranges over {_print(group)}, the group over {_print(near)}"
        if near.reductions + group.reductions > 1:
            return "the group would have two row reductions"
        if self._comes_back({*near.nodes, *group.nodes}):
            return "another operand depends on the group through a node outside it"
        return None

    def _comes_back(self, inside: set[Node]) -> bool:
        """Whether a node outside depends on one inside and is needed inside; other groups depend as a whole."""
        todo = [
            m
            for n in inside
            for v in n.operands
            if (m := self.producers.get(v)) is not None and m not in inside
        ]
        seen: set[Node] = set()
        while todo:
            node = todo.pop()
            if node in seen:
                continue
            group = self.group_of.get(node)
            members = [node] if group is None or not inside.isdisjoint(group.nodes) else group.nodes
            seen.update(members)
            for maker in (self.producers.get(v) for n in members for v in n.operands):
                if maker in inside:
                    return True
                if maker is not None:
                    todo.append(maker)
        return False

    def _edges(self, group: _Group) -> None:
        inside = set(group.nodes)
        made = {v for n in group.nodes for v in n.outputs}
        group.inputs = list(dict.fromkeys(v for n in group.nodes for v in n.operands if v not in made))
        group.outputs = [
            v for n in group.nodes for v in n.outputs
            if v in self.graph.outputs or any(user not in inside for user in self.uses[v])
        ]  # fmt: skip


def _space(node: Node) -> tuple[tuple[Dim, ...], Dim] | None:
    """The rows and width a node ranges over; None if it cannot be in a group."""
    if node.op in POINTWISE:
        type = node.output.tensor
    elif node.op in _ROW_OPS and axis_of(node) == node.operands[0].tensor.rank - 1:
        type = node.operands[0].tensor
    else:
        return None
    return (type.shape[:-1], type.shape[-1]) if type.rank else None


def _same_space(near: _Group, group: _Group) -> bool:
    """Equal rows and width; behind a reduction also one value a row, as [..., 1] or with the axis gone."""
    if (group.rows, group.width) == (near.rows, near.width):
        return True
    if not near.reductions or group.reductions:
        return False
    return (group.rows == near.rows and group.width == 1) or (*group.rows, group.width) == near.rows


def _print(group: _Group) -> str:
    return f"[{', '.join(map(str, (*group.rows, group.width)))}]"


def body_of(
    nodes: Sequence[Node], inputs: Sequence[Value], outputs: Sequence[Value], graph: Graph, name: str
) -> Graph:
    """Nodes of ``graph`` as a function whose names do not depend on where they were found."""
    used = {
        d
        for v in (*inputs, *(o for n in nodes for o in n.outputs))
        for e in v.shape
        for d in free_dims(e)
    }  # fmt: skip
    b = Builder(name, [d for d in graph.dims if d.name in used])
    table = {v: b.input(f"in{i}", v.type) for i, v in enumerate(inputs)}
    for node in nodes:
        operands = [None if v is None else table[v] for v in node.inputs]
        types = [v.tensor for v in node.outputs]
        results = b.emit_node(node.op, operands, node.attrs, types=types, name="v", origin=node.origin)
        table.update(zip(node.outputs, results, strict=True))
    return b.finish(*(table[v] for v in outputs))


def _replaced(graph: Graph, groups: list[_Group], refs: list[str]) -> Graph:
    """The function with one node for each group, in an order that respects data and effects."""
    units: dict[Node, Node] = {}
    for group, ref in zip(groups, refs, strict=True):
        attrs: dict[str, Attr] = {"fn": FuncRef(ref)}
        origin = Origin.merge(*(n.origin for n in group.nodes)).touched(BY)
        # The old values stay: whoever used them goes on using them.
        unit = Node("group", tuple(group.inputs), attrs, tuple(group.outputs), origin)
        units.update(dict.fromkeys(group.nodes, unit))
    position: dict[Node, int] = {}
    for i, node in enumerate(graph.nodes):
        position[units.get(node, node)] = i  # a group stands where its last node stood
    return replace(graph, nodes=tuple(_sorted(position)))


def _sorted(position: dict[Node, int]) -> list[Node]:
    """A topological order, as near to ``position`` as it can be."""
    producers = {v: n for n in position for v in n.outputs}
    waits: dict[Node, int] = {}
    followers: dict[Node, list[Node]] = {n: [] for n in position}
    ordered = [n for n in sorted(position, key=position.__getitem__) if _ordered(n)]
    chain = dict(zip(ordered[1:], ordered[:-1], strict=True))
    for node in position:
        before = {producers[v] for v in node.operands if v in producers}
        if node in chain:
            before.add(chain[node])
        waits[node] = len(before)
        for other in before:
            followers[other].append(node)
    ready = [(position[n], i, n) for i, n in enumerate(position) if not waits[n]]
    heapq.heapify(ready)
    result: list[Node] = []
    while ready:
        node = heapq.heappop(ready)[2]
        result.append(node)
        for other in followers[node]:
            waits[other] -= 1
            if not waits[other]:
                heapq.heappush(ready, (position[other], len(position) + position[other], other))
    assert len(result) == len(position), "a group depends on itself"
    return result


def _ordered(node: Node) -> bool:
    op = lookup(node.op)
    return op.reads_state or not op.pure
