"""Rotation and the cache's write within the attention that alone reads the rotated queries: for decode steps.

Before::

    %q = qkv_rope_write(%kv, %qkv, %step, %cos, %sin, heads=4, style="half") : bf16[T, 4, 16]
    %a = paged_attention(%q, %kv, %step, scale=0.25) : bf16[T, 4, 16]

After::

    %a = qkv_attention(%kv, %qkv, %step, %cos, %sin, heads=4, style="half", scale=0.25) : bf16[T, 4, 16]

It saves a launch, and queries need not go through memory. It is no part of the pipeline: with one query a sequence, the
new key and value matter to that query alone, so the compiler runs it on the buckets of decode steps.
"""

from compilerllm.ir.builder import Rewriter
from compilerllm.ir.graph import Graph, Node, Value
from compilerllm.ir.pattern import Matcher
from compilerllm.passes.opinfo import same_graph
from compilerllm.passes.report import PassReport

BY = "fuse_qkv_attention"


def fuse_qkv_attention(graph: Graph, report: PassReport) -> Graph:
    """One function with ``qkv_attention`` nodes."""
    matcher = Matcher(graph)
    place = {node: i for i, node in enumerate(graph.nodes)}
    write_of: dict[Node, Node] = {}  # the attention -> its qkv_rope_write
    for node in graph.nodes:
        if node.op != "qkv_rope_write":
            continue
        users = matcher.uses[node.output]
        attention = users[0] if users else None
        if (why := _refusal(graph, node, attention, matcher, place)) is not None:
            report.miss(node, why)
            continue
        assert attention is not None
        write_of[attention] = node
        report.match()
    if not write_of:
        return graph
    r = Rewriter(graph, by=BY)

    def visit(_: Rewriter, node: Node) -> tuple[Value, ...] | None:
        write = write_of.get(node)
        if write is None:
            return None
        inputs = (*(write.input(i) for i in range(7)), node.input(3))
        return r.emit_node(
            "qkv_attention", [None if v is None else r.get(v) for v in inputs], {**write.attrs, **node.attrs},
            name=node.output.name, origin=node.origin.merge(write.origin, node.origin).touched(BY),
        )  # fmt: skip

    return same_graph(graph, r.run(visit, skip=frozenset(write_of.values())))


def _refusal(
    graph: Graph, write: Node, attention: Node | None, matcher: Matcher, place: dict[Node, int]
) -> str | None:
    if attention is None or attention.op != "paged_attention" or attention.input(0) is not write.output:
        return f"its q goes to {attention.op if attention else 'no node'}, not to attention"
    if not matcher.used_once(write.output):
        return matcher.who_else(write.output, attention)
    state = write.operand(0)
    if attention.operand(1) is not state:
        return f"attention reads another state, %{attention.operand(1).name}"
    for node in graph.nodes[place[write] + 1 : place[attention]]:
        if state in node.operands:
            return f"{node.op} comes between and has the state too"
    return None
