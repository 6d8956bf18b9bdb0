"""Compute gate, up and their gated product in one linear.

Before::

    %gu = linear(%x, %gate_up.weight) : bf16[T, 512]
    %g = slice(%gu, axis=1, start=0, stop=256) : bf16[T, 256]
    %u = slice(%gu, axis=1, start=256, stop=512) : bf16[T, 256]
    %y = gated_act(%g, %u, act="silu") : bf16[T, 256]

After::

    %y = linear_gated(%x, %gate_up.weight, act="silu") : bf16[T, 256]

Where the halves come from something else than a linear of their own, ``gated_act_packed`` reads them in place.
"""

from compilerllm.ir.builder import Rewriter
from compilerllm.ir.graph import Graph, Node, Value
from compilerllm.ir.pattern import Any, Matcher, Mismatch, P
from compilerllm.passes.opinfo import axis_of, same_graph
from compilerllm.passes.report import PassReport

BY = "fuse_gated"
_HALVES = P(
    "gated_act", P("slice", Any("packed"), name="gate"), P("slice", Any("packed"), name="up"),
)  # fmt: skip


def fuse_gated(graph: Graph, report: PassReport) -> Graph:
    """One function with ``linear_gated`` and ``gated_act_packed`` nodes."""
    matcher = Matcher(graph)
    r = Rewriter(graph, by=BY)

    def visit(_: Rewriter, node: Node) -> tuple[Value, ...] | None:
        if node.op != "gated_act":
            return None
        found = matcher.match(_HALVES, node)
        if isinstance(found, Mismatch):
            report.miss(node, found if found.depth >= 2 else _unpacked(node, matcher))
            return None
        packed = found["packed"]
        if (why := _not_halves(packed, found.node("gate"), found.node("up"))) is not None:
            report.miss(node, why)
            return None
        report.match()
        linear = matcher.producers.get(packed)
        if (why := _not_linear(packed, linear, matcher)) is None:
            assert linear is not None
            operands = [None if v is None else r.get(v) for v in linear.inputs]
            origin = node.origin.merge(linear.origin, node.origin).touched(BY)
            return (
                r.emit("linear_gated", *operands, act=node.text("act"), name=node.output.name, origin=origin),
            )
        report.miss(node, why)
        return (r.emit("gated_act_packed", r.get(packed), act=node.text("act"), name=node.output.name),)

    return same_graph(graph, r.run(visit))


def _unpacked(node: Node, matcher: Matcher) -> str:
    makers = [matcher.producers.get(v) for v in node.operands]
    names = " and ".join(m.op if m is not None else "an input" for m in makers)
    return f"gate and up are no halves of one value, but {names}"


def _not_halves(packed: Value, gate: Node, up: Node) -> str | None:
    width = packed.shape[-1]
    if any(axis_of(n) != packed.tensor.rank - 1 for n in (gate, up)) or not isinstance(width, int):
        return "gate and up are not cut from the last axis"
    found = tuple((n.attrs["start"], n.attrs["stop"], n.integer("step", 1)) for n in (gate, up))
    if found != ((0, width // 2, 1), (width // 2, width, 1)):
        return f"gate and up are {found[0]} and {found[1]} of {width}, not its halves in this order"
    return None


def _not_linear(packed: Value, linear: Node | None, matcher: Matcher) -> str | None:
    if linear is None or linear.op != "linear":
        return f"the halves come from {linear.op if linear is not None else 'an input'}, not from a linear"
    if "out_dtype" in linear.attrs:
        return f"the linear's result is converted to {linear.attrs['out_dtype']}"
    if len(matcher.uses[packed]) != 2 or packed in matcher.outputs:
        cuts = matcher.uses[packed][:2]
        others = [n.op for n in matcher.uses[packed] if n not in cuts]
        return f"%{packed.name} is also " + (f"read by {' and '.join(others)}" if others else "returned")
    return None
