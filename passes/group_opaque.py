"""Gather opaque torch operators that need nothing computed between them, so that the host is called once for them all.

Before::

    %a = aten(%x, target="aten.sort.default", args=["%0"]) : f32[T, 8], i64[T, 8]
    %b = slice(%a, axis=1, start=0, stop=2) : f32[T, 2]
    %y = aten(%b, target="aten.logcumsumexp.default", args=["%0", 1]) : f32[T, 2]

After::

    func @opaque_0(%in0: f32[T, 8]) { %v, %v_1 = aten(%in0, ...) ... return %v_3 }
    %y = group(%x, fn=@opaque_0) : f32[T, 2]

Views between them go along; views of what was there before stay outside. A group stands where its first operator
stood, and the operators keep their order, for they may draw random numbers. Equal groups share a function.
"""

from dataclasses import dataclass, field, replace

from compilerllm.ir.graph import FuncRef, Graph, Module, Node, Origin, Value
from compilerllm.ir.text import print_graph
from compilerllm.ir.types import TensorType
from compilerllm.passes.fuse_pointwise import body_of
from compilerllm.passes.report import PassReport

BY = "group_opaque"
_VIEWS = frozenset(("reshape", "permute", "slice", "expand"))


def group_opaque(module: Module, report: PassReport) -> Module:
    """Rewrite every function; the groups become functions ``opaque_0``, ``opaque_1`` ... of the module."""
    bodies: dict[str, str] = {}  # a body's text under a common name -> the function's name
    added: list[Graph] = []
    changed: list[Graph] = []
    groups_before = {n.fn for g in module.functions.values() for n in g.nodes if n.op == "group"}
    for name, graph in module.functions.items():
        runs = [] if name in groups_before else _runs(graph, report)
        units: dict[Node, Node] = {}
        for run in runs:
            inputs, outputs = _edges(run, graph)
            body = body_of(run.inside, inputs, outputs, graph, "body")
            text = print_graph(body)
            if text not in bodies:
                number = len(bodies)
                while f"opaque_{number}" in module.functions:
                    number += 1
                bodies[text] = f"opaque_{number}"
                added.append(replace(body, name=bodies[text]))
            origin = Origin.merge(*(n.origin for n in run.nodes)).touched(BY)
            units[run.nodes[0]] = Node("group", inputs, {"fn": FuncRef(bodies[text])}, outputs, origin)
            report.match()
            report.count("opaque groups")
            report.count("opaque nodes", len(run.nodes))
        if units:
            changed.append(_replaced(graph, runs, units))
    return module.with_functions(*changed, *added) if changed else module


@dataclass(eq=False)
class _Run:
    """Opaque ``nodes`` that can run together; ``inside``: with the views between them; ``before``: views they read."""

    nodes: list[Node]
    inside: list[Node] = field(default_factory=list)
    before: list[Node] = field(default_factory=list)


def _runs(graph: Graph, report: PassReport) -> list[_Run]:
    """Runs of two operators or more. A run ends at the first that needs what was computed since the run began."""
    runs: list[_Run] = []
    later: dict[
        Value, Node
    ] = {}  # computed since the last run began, neither by it nor a view of older values
    for node in graph.nodes:
        blocking = [later[v] for v in node.operands if v in later]
        if node.op == "aten" and all(isinstance(v.type, TensorType) for v in node.operands):
            if runs and not blocking:
                runs[-1].nodes.append(node)
                continue
            if runs:
                report.miss(
                    node, f"it needs {blocking[0]!r}, which is computed after the operators before it"
                )
            runs.append(_Run([node]))
            later = {}
        elif node.op not in _VIEWS or blocking:
            later.update(dict.fromkeys(node.outputs, blocking[0] if node.op in _VIEWS else node))
    found = [run for run in runs if len(run.nodes) > 1]
    for run in found:
        _take_views(run, graph)
    return found


def _take_views(run: _Run, graph: Graph) -> None:
    """Sort the views that the run reads, of those behind its first operator, into inside and before."""
    order = {node: i for i, node in enumerate(graph.nodes)}
    producers = graph.producers()
    first = order[run.nodes[0]]
    inside = set(run.nodes)
    needed: set[Node] = set()
    todo = list(run.nodes)
    while todo:
        for value in todo.pop().operands:
            maker = producers.get(value)
            if maker is not None and maker not in inside and maker not in needed and order[maker] > first:
                needed.add(maker)
                todo.append(maker)
    for view in sorted(needed, key=order.__getitem__):  # a view's source stands before it
        (inside.add if producers.get(view.operands[0]) in inside else run.before.append)(view)
    run.inside = sorted(inside, key=order.__getitem__)


def _edges(run: _Run, graph: Graph) -> tuple[tuple[Value, ...], tuple[Value, ...]]:
    """Values the run reads, and those that others read of it."""
    inside = set(run.inside)
    made = [v for n in run.inside for v in n.outputs]
    read = dict.fromkeys(v for n in run.inside for v in n.operands)
    elsewhere = {v for n in graph.nodes if n not in inside for v in n.operands} | set(graph.outputs)
    return tuple(v for v in read if v not in set(made)), tuple(v for v in made if v in elsewhere)


def _replaced(graph: Graph, runs: list[_Run], units: dict[Node, Node]) -> Graph:
    """The function with one node for each run. The old values stay: whoever used them goes on using them."""
    starts = {run.nodes[0]: run for run in runs}
    gone = {node for run in runs for node in (*run.inside, *run.before)}
    nodes: list[Node] = []
    for node in graph.nodes:
        if node in starts:
            nodes += [*starts[node].before, units[node]]
        elif node not in gone:
            nodes.append(node)
    return replace(graph, nodes=tuple(nodes))
