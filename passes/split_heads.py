"""Sort the rows of a packed weight whose heads each hold q, k and v, so that q, k and v come one after another.

Before (gpt_neox: each of 4 heads has 16 rows of q, 16 of k, 16 of v)::

    param %qkv.weight : bf16[192, 64]
    %h = linear(%x, %qkv.weight) : bf16[T, 192]
    %r = reshape(%h, shape=[T, 4, 48]) : bf16[T, 4, 48]
    %q = slice(%r, axis=2, start=0, stop=16) : bf16[T, 4, 16]
    ...

After::

    param %qkv.weight : bf16[192, 64] = concat(reshape(slice(reshape(read("qkv.weight"), [4, 48, 64]), axis=1, ...
    %h = linear(%x, %qkv.weight) : bf16[T, 192]
    %a = slice(%h, axis=1, start=0, stop=64) : bf16[T, 64]
    %q = reshape(%a, shape=[T, 4, 16]) : bf16[T, 4, 16]
    ...
"""

from compilerllm.ir.builder import Rewriter
from compilerllm.ir.graph import Graph, Node, Param, Value
from compilerllm.ir.pattern import Matcher
from compilerllm.ir.recipe import Concat, Recipe, Reshape, Slice
from compilerllm.passes.opinfo import axis_of, same_graph
from compilerllm.passes.report import PassReport

BY = "split_heads"


def split_heads(graph: Graph, report: PassReport) -> Graph:
    """One function whose packed projections are cut along whole rows."""
    matcher = Matcher(graph)
    params = {p.value: p for p in graph.params}
    found: dict[Node, list[Node]] = {}  # the linear -> its slices, in the order of their columns
    for node in graph.nodes:
        if node.op == "linear" and (cuts := _cuts(node, matcher)) is not None:
            if (why := _not_sortable(node, matcher, params)) is not None:
                report.miss(node, why)
                continue
            found[node] = cuts
            report.match()
    if not found:
        return graph
    r = Rewriter(graph, by=BY)
    skip = {n for cuts in found.values() for n in cuts} | {matcher.uses[n.output][0] for n in found}

    def visit(_: Rewriter, node: Node) -> tuple[Value, ...] | None:
        if node not in found:
            return None
        cuts = found[node]
        heads, width = cuts[0].operands[0].shape[-2:]
        assert isinstance(heads, int) and isinstance(width, int)
        ranges = [(n.integer("start"), n.integer("stop")) for n in cuts]
        weights = [_sorted(r, params[v], heads, width, ranges) for v in node.operands[1:]]
        operands = (r.get(node.operands[0]), *weights)
        (packed,) = r.emit_node("linear", operands, node.attrs, name=node.output.name)
        at = 0
        for cut, (start, stop) in zip(cuts, ranges, strict=True):
            rows = heads * (stop - start)
            part = r.emit("slice", packed, axis=packed.tensor.rank - 1, start=at, stop=at + rows)
            r.set(cut.output, r.emit("reshape", part, shape=cut.output.shape, name=cut.output.name))
            at += rows
        return (packed,)

    return same_graph(graph, r.run(visit, skip=frozenset(skip)))


def _cuts(linear: Node, matcher: Matcher) -> list[Node] | None:
    """The slices of each head's columns, if the result is used for nothing else and they cover it."""
    if not matcher.used_once(linear.output):
        return None
    heads = matcher.uses[linear.output][0]
    if (
        heads.op != "reshape"
        or heads.output.tensor.rank != linear.output.tensor.rank + 1
        or heads.output in matcher.outputs
    ):
        return None
    users = matcher.uses[heads.output]
    last = heads.output.tensor.rank - 1
    if len(users) < 2 or any(
        n.op != "slice" or axis_of(n) != last or n.integer("step", 1) != 1 for n in users
    ):
        return None
    if any(not isinstance(n.attrs[key], int) for n in users for key in ("start", "stop")):
        return None
    cuts = sorted(users, key=lambda n: n.integer("start"))
    edges = [0, *(n.attrs["stop"] for n in cuts)]
    return (
        cuts
        if [n.attrs["start"] for n in cuts] == edges[:-1] and edges[-1] == heads.output.shape[-1]
        else None
    )


def _not_sortable(linear: Node, matcher: Matcher, params: dict[Value, Param]) -> str | None:
    for value in linear.operands[1:]:
        if value not in params or not matcher.used_once(value):
            return f"%{value.name} is computed or used elsewhere too"
        if value.tensor.is_quantized:
            return f"%{value.name} is {value.dtype}, whose rows are not sorted yet"
    return None


def _sorted(r: Rewriter, param: Param, heads: int, width: int, ranges: list[tuple[int, int]]) -> Value:
    """The parameter with rows [head, column] sorted into [part, head, column of the part]."""
    rest = tuple(int(d) for d in param.value.shape[1:])
    by_head = Reshape(param.recipe, (heads, width, *rest))
    parts: list[Recipe] = [
        Reshape(Slice(by_head, 1, start, stop), (heads * (stop - start), *rest)) for start, stop in ranges
    ]
    return r.param(f"{param.name}.by_part", param.value.tensor, Concat(tuple(parts), 0))
