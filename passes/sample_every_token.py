"""Drop the gathering of sampled rows where a step samples all of its tokens.

Before::

    %rows = step_field(%step, field="sample_rows") : i32[R]
    %h.rows = gather_rows(%h, %rows) : bf16[R, 64]
    %n = rms_norm(%h.rows, %norm.weight, eps=1e-06) : bf16[R, 64]

After::

    %n = rms_norm(%h, %norm.weight, eps=1e-06) : bf16[T, 64]

For buckets of pure decoding: such a step has one token a sequence and samples each, so row r is token r and R is T.
Whoever picks a bucket must see to it that a step with unsampled tokens gets another.
"""

from compilerllm.ir.builder import Rewriter
from compilerllm.ir.dims import Dim, dim, substitute, symbol
from compilerllm.ir.graph import Attr, Graph, Node, Value
from compilerllm.ir.types import StepType
from compilerllm.passes.report import PassReport


def sample_every_token(graph: Graph, report: PassReport) -> Graph:
    """Rewrite a flat ``main`` (other functions are returned as they are)."""
    if graph.name != "main" or not any(isinstance(v.type, StepType) for v in graph.inputs):
        return graph
    producers = graph.producers()
    gathers = {n for n in graph.nodes if n.op == "gather_rows" and _of_step(producers.get(n.operand(1)))}
    if not gathers:
        return graph
    report.matches += len(gathers)

    def visit(r: Rewriter, node: Node) -> tuple[Value, ...] | None:
        if node in gathers:
            return (r.get(node.operand(0)),)
        attrs = {key: _attr(value) for key, value in node.attrs.items()}
        if attrs == dict(node.attrs):
            return None
        inputs = [None if v is None else r.get(v) for v in node.inputs]
        types = [v.tensor.with_shape(*map(_tokens, v.shape)) for v in node.outputs]
        return r.emit_node(node.op, inputs, attrs, types=types, name=node.outputs[0].name)

    return Rewriter(graph, by="sample_every_token").run(visit)


def _of_step(node: Node | None) -> bool:
    return node is not None and node.op == "step_field" and node.text("field") == "sample_rows"


def _tokens(extent: Dim) -> Dim:
    return dim(substitute(extent, {"R": symbol("T")}))


def _attr(value: Attr) -> Attr:
    if isinstance(value, tuple):
        return tuple(_attr(v) for v in value)
    return _tokens(dim(value)) if hasattr(value, "free_symbols") else value
