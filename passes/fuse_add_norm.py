"""Join a residual add with the norm that follows it; both results stay.

Before::

    %sum = add(%x, %residual) : bf16[T, 64]
    %n = rms_norm(%sum, %norm.weight, eps=1e-06, round_first=true) : bf16[T, 64]

After::

    %n, %sum = add_rms_norm(%x, %residual, %norm.weight, eps=1e-06, round_first=true) : bf16[T, 64], bf16[T, 64]

The same for ``layer_norm``. The sum is rounded to its dtype before the norm reads it, as before.
"""

from compilerllm.ir.builder import Rewriter
from compilerllm.ir.graph import Graph, Node, Value
from compilerllm.passes.opinfo import NORMS, same_graph
from compilerllm.passes.report import PassReport

BY = "fuse_add_norm"


def fuse_add_norm(graph: Graph, report: PassReport) -> Graph:
    """One function with ``add_rms_norm`` and ``add_layer_norm``."""
    producers = graph.producers()
    norm_of: dict[Node, Node] = {}  # the add -> its norm
    for node in graph.nodes:
        if node.op not in NORMS:
            continue
        add = producers.get(node.operands[0])
        if add is None:
            continue
        if (why := _not_fusable(add, node, producers, norm_of)) is None:
            norm_of[add] = node
            report.match()
        elif add.op == "add":
            report.miss(node, why)
    if not norm_of:
        return graph
    r = Rewriter(graph, by=BY)

    def visit(_: Rewriter, node: Node) -> tuple[Value, ...] | None:
        norm = norm_of.get(node)
        if norm is None:
            return None
        operands = [
            *(r.get(v) for v in node.operands),
            *(None if v is None else r.get(v) for v in norm.inputs[1:]),
        ]
        origin = node.origin.merge(norm.origin, node.origin).touched(BY)
        normed, total = r.emit_node(
            f"add_{norm.op}", operands, norm.attrs, name=norm.output.name, origin=origin
        )
        r.set(norm.output, normed)
        return (total,)

    return same_graph(graph, r.run(visit, skip=frozenset(norm_of.values())))


def _not_fusable(add: Node, norm: Node, producers: dict[Value, Node], taken: dict[Node, Node]) -> str | None:
    if add.op != "add" or len(add.operands) != 2:
        return f"{add.op} stands before the norm"
    if any(v.type != add.output.type for v in add.operands):
        return f"the add broadcasts or converts: {add.operands[0].type} + {add.operands[1].type}"
    if add in taken:
        return f"the sum is already normed by {taken[add]!r}"
    if any(v in producers for v in norm.operands[1:]):
        return "the norm's weight is computed, not a parameter"
    return None
