"""Find the gate of a gated MLP: an activation times another value.

Before::

    %a = silu(%gate) : bf16[T, 256]
    %y = mul(%a, %up) : bf16[T, 256]

After::

    %y = gated_act(%gate, %up, act="silu") : bf16[T, 256]

The activation's result is rounded before the product in both. The order of a product does not matter.
"""

from compilerllm.ir.builder import Rewriter
from compilerllm.ir.graph import Graph, Node, Value
from compilerllm.ir.pattern import Any, Matcher, Mismatch, P
from compilerllm.passes.opinfo import ACTIVATION_NODES, same_graph
from compilerllm.passes.report import PassReport

_GATED = P("mul", P(tuple(sorted(ACTIVATION_NODES)), Any("gate"), name="act"), Any("up"), commutative=True)
_RELU2 = (
    P("mul", P("square", P("relu", Any("gate"))), Any("up"), commutative=True),
    P(
        "mul",
        P("pow", P("relu", Any("gate")), attrs={"scalar": 2, "reverse": None}),
        Any("up"),
        commutative=True,
    ),
)


def raise_gated_act(graph: Graph, report: PassReport) -> Graph:
    """One function with ``gated_act`` nodes."""
    matcher = Matcher(graph)
    r = Rewriter(graph, by="raise_gated_act")

    def visit(_: Rewriter, node: Node) -> tuple[Value, ...] | None:
        if node.op != "mul":
            return None
        for pattern in (_GATED, *_RELU2):
            found = matcher.match(pattern, node)
            if isinstance(found, Mismatch):
                report.miss(node, found)
                continue
            gate, up = found["gate"], found["up"]
            if gate.type != up.type or gate.type != node.output.type:
                report.miss(node, f"gate is {gate.type}, up is {up.type}")
                continue
            act = found.node("act").op if pattern is _GATED else "relu2"
            report.match()
            return (r.emit("gated_act", r.get(gate), r.get(up), act=act, name=node.output.name),)
        return None

    return same_graph(graph, r.run(visit))
