"""Find a rotation of the first columns only, written as slices and a concat.

Before::

    %a = slice(%q, axis=2, start=0, stop=16) : bf16[T, 4, 16]
    %b = slice(%q, axis=2, start=16, stop=64) : bf16[T, 4, 48]
    %r = rope(%a, %cos, %sin, style="half", head_axis=-2) : bf16[T, 4, 16]
    %y = concat(%r, %b, axis=2) : bf16[T, 4, 64]

After::

    %y = rope(%q, %cos, %sin, style="half", head_axis=-2) : bf16[T, 4, 64]

``rope`` rotates as many columns as its table is wide and passes the rest.
"""

from compilerllm.ir.builder import Rewriter
from compilerllm.ir.graph import Graph, Node, Value
from compilerllm.ir.pattern import Any, Matcher, Mismatch, P
from compilerllm.passes.opinfo import axis_of, same_graph
from compilerllm.passes.report import PassReport

_PARTIAL = P(
    "concat",
    P("rope", P("slice", Any("x"), name="head"), Any("cos"), Any("sin"), name="rope"),
    P("slice", Any("x"), name="tail"),
)


def raise_partial_rope(graph: Graph, report: PassReport) -> Graph:
    """One function with whole ropes."""
    matcher = Matcher(graph)
    r = Rewriter(graph, by="raise_partial_rope")

    def visit(_: Rewriter, node: Node) -> tuple[Value, ...] | None:
        if node.op != "concat":
            return None
        found = matcher.match(_PARTIAL, node)
        if isinstance(found, Mismatch):
            report.miss(node, found)
            return None
        x, rope = found["x"], found.node("rope")
        if (why := _not_partial(node, x, rope, found.node("head"), found.node("tail"))) is not None:
            report.miss(node, why)
            return None
        report.match()
        operands = (r.get(x), r.get(found["cos"]), r.get(found["sin"]))
        return r.emit_node("rope", operands, rope.attrs, name=node.output.name)

    return same_graph(graph, r.run(visit))


def _not_partial(concat: Node, x: Value, rope: Node, head: Node, tail: Node) -> str | None:
    last = x.tensor.rank - 1
    if any(axis_of(n) != last for n in (concat, head, tail)):
        return "the slices are not of the last axis"
    if any(n.integer("step", 1) != 1 for n in (head, tail)):
        return "a slice takes every other column"
    if (
        head.attrs["start"] != 0
        or head.attrs["stop"] != tail.attrs["start"]
        or tail.attrs["stop"] != x.shape[-1]
    ):
        return "the slices are not the two parts of one value"
    width = rope.operands[1].shape[-1] * (2 if rope.attrs.get("half_width") else 1)
    if width != head.attrs["stop"]:
        return f"the table is {width} wide, the slice {head.attrs['stop']}"
    return None
