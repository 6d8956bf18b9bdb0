"""Add the residual in the linear whose result it is added to, where no norm took the add.

Before::

    %h = linear(%x, %w) : bf16[T, 64]
    %y = add(%residual, %h) : bf16[T, 64]

After::

    %y = linear_add(%x, %w, %residual) : bf16[T, 64]

The linear's result is rounded to its dtype before the addition, as before.
"""

from compilerllm.ir.builder import Rewriter
from compilerllm.ir.graph import Graph, Node, Value
from compilerllm.ir.pattern import Matcher
from compilerllm.passes.opinfo import same_graph
from compilerllm.passes.report import PassReport

BY = "fuse_linear_add"


def fuse_linear_add(graph: Graph, report: PassReport) -> Graph:
    """One function with ``linear_add`` nodes."""
    matcher = Matcher(graph)
    r = Rewriter(graph, by=BY)

    def visit(_: Rewriter, node: Node) -> tuple[Value, ...] | None:
        if node.op != "add" or len(node.operands) != 2:
            return None
        # The later of two linears: its operands are there when the other one's result is.
        for linear_at in (1, 0):
            h, residual = node.operands[linear_at], node.operands[1 - linear_at]
            linear = matcher.producers.get(h)
            if linear is None or linear.op != "linear":
                continue
            if (why := _not_fusable(node, linear, h, residual, matcher)) is not None:
                report.miss(node, why)
                continue
            report.match()
            x, weight, bias = (linear.input(i) for i in range(3))
            operands = [None if v is None else r.get(v) for v in (x, weight, residual, bias)]
            origin = node.origin.merge(linear.origin, node.origin).touched(BY)
            return (r.emit("linear_add", *operands, name=node.output.name, origin=origin),)
        return None

    return same_graph(graph, r.run(visit))


def _not_fusable(add: Node, linear: Node, h: Value, residual: Value, matcher: Matcher) -> str | None:
    if not matcher.used_once(h):
        return matcher.who_else(h, add)
    if residual.type != h.type or add.output.type != h.type:
        return f"the residual is {residual.type}, the linear's result {h.type}"
    if "out_dtype" in linear.attrs:
        return f"the linear's result is converted to {linear.attrs['out_dtype']}"
    return None
