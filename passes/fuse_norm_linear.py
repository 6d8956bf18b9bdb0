"""Norm rows inside the linear that alone reads them: for steps of so few tokens that every program can norm them anew.

Before::

    %n, %sum = add_rms_norm(%x, %residual, %norm.weight, eps=1e-06) : bf16[T, 64], bf16[T, 64]
    %y = linear(%n, %w) : bf16[T, 128]

After::

    %y, %sum = norm_linear(%x, %residual, %norm.weight, %w, eps=1e-06) : bf16[T, 128], bf16[T, 64]

The same for ``linear_gated``. It saves a launch whose only work is a few kilobytes, during which no weight is read.
It is no part of the pipeline: the compiler runs it on the buckets that are small enough.
"""

from compilerllm.ir.builder import Rewriter
from compilerllm.ir.graph import Graph, Node, Value
from compilerllm.ir.pattern import Matcher
from compilerllm.passes.opinfo import same_graph
from compilerllm.passes.report import PassReport

BY = "fuse_norm_linear"
FUSED = {"linear": "norm_linear", "linear_gated": "norm_linear_gated"}


def fuse_norm_linear(graph: Graph, report: PassReport) -> Graph:
    """One function with ``norm_linear`` and ``norm_linear_gated`` nodes."""
    matcher, uses = Matcher(graph), graph.uses()
    linear_of: dict[Node, Node] = {}  # the norm -> its linear
    for node in graph.nodes:
        if node.op not in ("add_rms_norm", "add_layer_norm"):
            continue
        users = uses.get(node.outputs[0], [])
        linear = users[0] if users else None
        if linear is None or linear.op not in FUSED or linear.input(0) != node.outputs[0]:
            continue
        if (why := _not_fusable(node, linear, matcher)) is not None:
            report.miss(node, why)
            continue
        linear_of[node] = linear
        report.match()
    if not linear_of:
        return graph
    r = Rewriter(graph, by=BY)

    def visit(_: Rewriter, node: Node) -> tuple[Value, ...] | None:
        linear = linear_of.get(node)
        if linear is None:
            return None
        inputs = (*(node.input(i) for i in range(3)), *(linear.input(i) for i in (1, 2)))
        origin = node.origin.merge(linear.origin, node.origin).touched(BY)
        y, total = r.emit_node(
            FUSED[linear.op], [None if v is None else r.get(v) for v in inputs], {**node.attrs, **linear.attrs},
            name=linear.output.name, origin=origin,
        )  # fmt: skip
        r.set(linear.output, y)
        return y, total

    return same_graph(graph, r.run(visit, skip=frozenset(linear_of.values())))


def _not_fusable(norm: Node, linear: Node, matcher: Matcher) -> str | None:
    normed = norm.outputs[0]
    if norm.op != "add_rms_norm":
        return f"linears' kernels norm rows by their mean square; {norm.op} takes off the mean as well"
    if not matcher.used_once(normed):
        return matcher.who_else(normed, linear)
    made = matcher.producers.get(norm.operand(0))
    if made is not None and made.op == "gather_rows":
        return "only sampled rows are normed: a norm of its own reads them by their index, a linear's kernel cannot"
    weights = [norm.input(2), linear.input(1), linear.input(2)]
    if weights[0] is None:
        return "the norm has no weight"
    if any(v is not None and v in matcher.producers for v in weights):
        return "a weight is computed, not a parameter"
    if weights[1] is not None and weights[1].tensor.is_quantized:
        return f"the linear's weight is {weights[1].type}"
    return None
