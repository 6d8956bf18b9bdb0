"""Apply an activation in the linear that feeds it.

Before::

    %h = linear(%x, %w, %b) : bf16[T, 256]
    %y = gelu_tanh(%h) : bf16[T, 256]

After::

    %y = linear_act(%x, %w, %b, act="gelu_tanh") : bf16[T, 256]

The linear's result is rounded to its dtype before the activation, as before.
"""

from compilerllm.ir.builder import Rewriter
from compilerllm.ir.graph import Graph, Node, Value
from compilerllm.ir.pattern import Any, Match, Matcher, Mismatch, P
from compilerllm.passes.opinfo import ACTIVATION_NODES, same_graph
from compilerllm.passes.report import PassReport

_ACT = tuple(sorted(ACTIVATION_NODES))
_RELU2 = (
    P("square", P("relu", Any("h"), name="relu")),
    P("pow", P("relu", Any("h"), name="relu"), attrs={"scalar": 2, "reverse": None}),
)


def fuse_linear_act(graph: Graph, report: PassReport) -> Graph:
    """One function with ``linear_act`` nodes."""
    matcher = Matcher(graph)
    r = Rewriter(graph, by="fuse_linear_act")

    def fuse(node: Node, h: Value, act: str) -> tuple[Value, ...] | None:
        linear = matcher.producers.get(h)
        if linear is None or linear.op != "linear":
            return None
        if not matcher.used_once(h):
            report.miss(node, matcher.who_else(h, node))
            return None
        if "out_dtype" in linear.attrs:
            report.miss(node, f"the linear's result is converted to {linear.attrs['out_dtype']}")
            return None
        report.match()
        operands = [None if v is None else r.get(v) for v in linear.inputs]
        origin = node.origin.merge(linear.origin, node.origin).touched("fuse_linear_act")
        return (r.emit("linear_act", *operands, act=act, name=node.output.name, origin=origin),)

    def visit(_: Rewriter, node: Node) -> tuple[Value, ...] | None:
        for pattern in _RELU2:
            found: Match | Mismatch = matcher.match(pattern, node)
            if isinstance(found, Match):
                return fuse(node, found["h"], "relu2")
        if node.op in _ACT and not _feeds_relu2(node):
            return fuse(node, node.operands[0], node.op)
        return None

    def _feeds_relu2(node: Node) -> bool:
        users = matcher.uses[node.output]
        return (
            node.op == "relu"
            and len(users) == 1
            and bool(matcher.match(_RELU2[0], users[0]) or matcher.match(_RELU2[1], users[0]))
        )

    return same_graph(graph, r.run(visit))
