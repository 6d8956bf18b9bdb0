"""Compute equal expressions once, and drop what nobody uses.

Before::

    %a = silu(%x) : bf16[T, 64]
    %b = silu(%x) : bf16[T, 64]
    %dead = neg(%x) : bf16[T, 64]
    %y = mul(%a, %b) : bf16[T, 64]

After::

    %a = silu(%x) : bf16[T, 64]
    %y = mul(%a, %a) : bf16[T, 64]

Nodes with effects, those that read a state and opaque ones (which may draw random numbers) are never joined.
"""

from compilerllm.ir.builder import Rewriter
from compilerllm.ir.graph import Graph, Node, Value
from compilerllm.ir.op import lookup
from compilerllm.passes.opinfo import same_graph
from compilerllm.passes.report import PassReport

_NEVER = frozenset(("aten", "call", "group"))


def deduplicate(graph: Graph, report: PassReport) -> Graph:
    """One function without duplicates and dead nodes."""
    seen: dict[object, tuple[Value, ...]] = {}
    r = Rewriter(graph, by="deduplicate")

    def visit(_: Rewriter, node: Node) -> tuple[Value, ...] | None:
        op = lookup(node.op)
        if node.op in _NEVER or not op.pure or op.reads_state:
            return None
        inputs = tuple(None if v is None else r.get(v) for v in node.inputs)
        key = (node.op, inputs, tuple(sorted((k, _typed(v)) for k, v in node.attrs.items())))
        if key in seen:
            report.match()
            return seen[key]
        seen[key] = result = r.copy(node)
        return result

    new = same_graph(graph, r.run(visit))
    report.match(max(0, len(graph.nodes) - len(new.nodes) - report.matches))
    return new


def _typed(value: object) -> str:
    """An attribute as a key: 1, 1.0 and true are different ones."""
    return f"{type(value).__name__} {value!r}"
