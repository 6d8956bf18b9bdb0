"""Logits leave the program in float32, as sampling reads them."""

from compilerllm.ir.builder import Rewriter
from compilerllm.ir.graph import Graph, Node, Value
from compilerllm.passes.report import PassReport


def float_logits(graph: Graph, report: PassReport) -> Graph:
    """Let ``main``'s head keep its float32 sums instead of rounding them to the activations' type.

    before::

        %logits = linear(%x, %lm_head.weight) : bf16[R, 49152]
        return %logits

    after::

        %logits = linear(%x, %lm_head.weight, out_dtype="f32") : f32[R, 49152]
        return %logits

    Where something else gives the logits (a softcap, a scale), they are cast.
    """
    if graph.name != "main" or len(graph.outputs) != 1 or graph.outputs[0].dtype == "f32":
        return graph
    logits = graph.outputs[0]
    head = graph.producers().get(logits)
    report.match()

    def visit(r: Rewriter, node: Node) -> tuple[Value, ...] | None:
        if node is not head:
            return None
        if node.op == "linear" and not graph.uses()[logits]:
            inputs = tuple(None if v is None else r.get(v) for v in node.inputs)
            return r.emit_node("linear", inputs, {**node.attrs, "out_dtype": "f32"}, name=logits.name)
        made = r.copy(node)
        r.set(logits, r.emit("cast", made[0], dtype="f32", name=f"{logits.name}.f32"))
        return (r.get(logits),)

    return Rewriter(graph, "float_logits").run(visit)
