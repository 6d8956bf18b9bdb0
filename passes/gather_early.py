"""Take the sampled rows before the last layer's per-row work, not after it.

Before, at the end of a flat ``main`` (a layer's output projection and feed-forward)::

    %o = linear(%attention, %layers.1.o.weight) : bf16[T, 64]
    %n, %sum = add_rms_norm(%residual, %o, %layers.1.norm.weight, eps=1e-06) : bf16[T, 64], bf16[T, 64]
    %m = linear(%n, %layers.1.mlp.weight) : bf16[T, 64]
    %m.rows = gather_rows(%m, %sample_rows) : bf16[R, 64]

After::

    %attention.rows = gather_rows(%attention, %sample_rows) : bf16[R, 64]
    %o = linear(%attention.rows, %layers.1.o.weight) : bf16[R, 64]
    ...
    %m = linear(%n, %layers.1.mlp.weight) : bf16[R, 64]

A prompt of 8,000 tokens then computes the last layer's projections for one row instead of 8,000. Rows that are not
sampled only had to reach the last layer's keys and values. Where every token is sampled it would gain nothing, so
buckets of pure decoding leave it out.
"""

from compilerllm.ir.builder import Rewriter, prune
from compilerllm.ir.graph import Graph, Node, Value
from compilerllm.ir.types import StepType
from compilerllm.passes.gather_rows import _Gatherer, rowwise
from compilerllm.passes.opinfo import axes_with
from compilerllm.passes.report import PassReport


def gather_early(graph: Graph, report: PassReport) -> Graph:
    """Rewrite a flat ``main`` (other functions are returned as they are)."""
    step = next((v for v in graph.inputs if isinstance(v.type, StepType)), None)
    if graph.name != "main" or step is None:
        return graph
    tail = _tail(graph)
    if not tail:
        return graph
    r = _Early(graph, step, tail, report, by="gather_early")
    return prune(r.run(lambda _, node: r.visit(node)))


def _tail(graph: Graph) -> frozenset[Node]:
    """Nodes whose results are wanted for sampled rows only."""
    uses = graph.uses()
    producers = graph.producers()
    found: set[Node] = set()

    def wanted_by_rows(user: Node, value: Value) -> bool:
        if user in found:
            return True
        rows = producers.get(user.operand(1)) if user.op == "gather_rows" else None
        sampled = rows is not None and rows.op == "step_field" and rows.text("field") == "sample_rows"
        return sampled and user.operand(0) is value

    for node in reversed(graph.nodes):
        if node.op in ("gather_rows", "embedding") or not node.outputs or not rowwise(node):
            continue
        if any(v in graph.outputs for v in node.outputs) or axes_with(node.outputs[0].tensor, "T") != (0,):
            continue
        if all(wanted_by_rows(user, v) for v in node.outputs for user in uses[v]) and any(
            uses[v] for v in node.outputs
        ):
            found.add(node)
    return frozenset(found)


class _Early(_Gatherer):
    def finish(self, *outputs: Value) -> Graph:
        """Results stay what they are: what is wanted of every token is gathered by whoever wants it."""
        return Rewriter.finish(self, *outputs)

    def visit(self, node: Node) -> tuple[Value, ...] | None:
        if node.op == "gather_rows" and node.operand(0) in self.in_tail:
            return (self.get(node.operand(0)),)
        return super().visit(node)
