"""Route within the linear that gives the logits, and norm its rows there: for steps of few tokens.

Before::

    %n, %sum = add_rms_norm(%x, %residual, %norm.weight, eps=1e-06) : bf16[T, 64], bf16[T, 64]
    %l = linear(%n, %gate.weight) : bf16[T, 16]
    %w, %ids = route(%l, k=4, softmax="before", dtype="bf16") : bf16[T, 4], i64[T, 4]

After::

    %n, %sum, %w, %ids = norm_route(%x, %residual, %norm.weight, %gate.weight, eps=1e-06, k=4, ...) : ...

The experts read the norm too, so it stays a result. It saves two launches that read next to nothing. It is no part of
the pipeline: the compiler runs it, after ``fuse_route``, on the buckets that are small enough.
"""

from compilerllm.ir.builder import Rewriter
from compilerllm.ir.graph import Graph, Node, Value
from compilerllm.ir.pattern import Matcher
from compilerllm.passes.opinfo import same_graph
from compilerllm.passes.report import PassReport

BY = "fuse_norm_route"


def fuse_norm_route(graph: Graph, report: PassReport) -> Graph:
    """One function with ``norm_route`` nodes."""
    matcher = Matcher(graph)
    found: dict[Node, tuple[Node, Node]] = {}  # the norm -> its linear and route
    for node in graph.nodes:
        if node.op != "route":
            continue
        linear = matcher.producers.get(node.operand(0))
        norm = matcher.producers.get(linear.operand(0)) if linear is not None and linear.operands else None
        if (why := _refusal(node, linear, norm, matcher)) is not None:
            report.miss(node, why)
            continue
        assert norm is not None and linear is not None
        found[norm] = (linear, node)
        report.match()
    if not found:
        return graph
    r = Rewriter(graph, by=BY)

    def visit(_: Rewriter, node: Node) -> tuple[Value, ...] | None:
        if node not in found:
            return None
        linear, route = found[node]
        inputs = (*(node.input(i) for i in range(3)), *linear.inputs[1:])
        made = r.emit_node(
            "norm_route", [None if v is None else r.get(v) for v in inputs], {**node.attrs, **route.attrs},
            name=node.outputs[0].name, origin=node.origin.merge(linear.origin, route.origin).touched(BY),
        )  # fmt: skip
        for old, new in zip(route.outputs, made[2:], strict=True):
            r.set(old, new)
        return made[:2]

    skip = frozenset(n for pair in found.values() for n in pair)
    return same_graph(graph, r.run(visit, skip=skip))


def _refusal(route: Node, linear: Node | None, norm: Node | None, matcher: Matcher) -> str | None:
    if linear is None or linear.op != "linear" or "out_dtype" in linear.attrs:
        return f"the logits come from {linear.op if linear else 'an input'}, not from a linear that keeps its dtype"
    if not matcher.used_once(linear.output):
        return matcher.who_else(linear.output, route)
    if norm is None or norm.op != "add_rms_norm" or norm.outputs[0] is not linear.operand(0):
        return f"the linear takes {norm.op if norm else 'an input'}, not the norm of a sum"
    if any(v in matcher.producers for v in linear.inputs[1:]):
        return "the linear's weight or bias is computed"
    weight = linear.operand(1).tensor
    if norm.input(2) is None or weight.is_quantized or weight.dtype != linear.output.dtype:
        return f"the norm has no weight, or the linear's is {weight.dtype}"
    return None
