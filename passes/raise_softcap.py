"""Find a soft cap: a value divided by a number, tanh, times the same number.

Before::

    %a = div(%x, scalar=30.0) : bf16[T, 256]
    %b = tanh(%a) : bf16[T, 256]
    %y = mul(%b, scalar=30.0) : bf16[T, 256]

After::

    %y = softcap(%x, cap=30.0) : bf16[T, 256]

``softcap`` rounds after each of the three steps too.
"""

from compilerllm.ir.builder import Rewriter
from compilerllm.ir.graph import Graph, Node, Value
from compilerllm.ir.pattern import Any, Match, Matcher, Mismatch, P
from compilerllm.passes.opinfo import same_graph
from compilerllm.passes.report import PassReport

_PLAIN = {"reverse": lambda v: not v, "scalar": lambda v: isinstance(v, int | float) and v > 0}
_SOFTCAP = P("mul", P("tanh", P("div", Any("x"), attrs=_PLAIN, name="div")), attrs=_PLAIN)


def raise_softcap(graph: Graph, report: PassReport) -> Graph:
    """One function with ``softcap`` nodes."""
    matcher = Matcher(graph)
    r = Rewriter(graph, by="raise_softcap")

    def visit(_: Rewriter, node: Node) -> tuple[Value, ...] | None:
        if node.op != "mul" or "scalar" not in node.attrs:
            return None
        found: Match | Mismatch = matcher.match(_SOFTCAP, node)
        if isinstance(found, Mismatch):
            report.miss(node, found)
            return None
        cap, divisor = node.number("scalar"), found.node("div").number("scalar")
        if cap != divisor:
            report.miss(node, f"divided by {divisor}, but multiplied by {cap}")
            return None
        report.match()
        return (r.emit("softcap", r.get(found["x"]), cap=cap, name=node.output.name),)

    return same_graph(graph, r.run(visit))
