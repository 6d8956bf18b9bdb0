"""Choose experts and their weights in one node: the softmax, the largest, and what makes weights of them.

Before::

    %p = softmax(%logits, axis=1) : f32[T, 128]
    %v, %ids = topk(%p, k=8) : f32[T, 8], i64[T, 8]
    %w = group(%v, fn=@group_1) : bf16[T, 8]

After::

    %w, %ids = route(%logits, k=8, softmax="before", normalise=true, dtype="bf16") : bf16[T, 8], i64[T, 8]

``@group_1`` divides by the sum and casts. gpt_oss takes the largest logits first and their softmax afterwards
(``softmax="after"``). It runs after ``fuse_pointwise`` for targets that have a kernel for ``route``.
"""

from dataclasses import dataclass

from compilerllm.ir.builder import Rewriter
from compilerllm.ir.graph import Attr, Graph, Module, Node, Value
from compilerllm.passes.opinfo import axis_of
from compilerllm.passes.report import PassReport

BY = "fuse_route"


@dataclass(frozen=True)
class _Chain:
    """Nodes applied one after another to a value, taken out of their group where they are in one."""

    source: Value
    nodes: tuple[Node, ...]

    @property
    def ops(self) -> str:
        return " ".join(n.op for n in self.nodes)


def fuse_route(module: Module, report: PassReport | None = None) -> Module:
    """The module with ``route`` nodes; groups that nothing calls any more are gone."""
    report = report or PassReport(BY)
    bodies = {n.fn for g in module.functions.values() for n in g.nodes if n.op == "group"}
    changed = [g for name, g in module.functions.items() if name not in bodies]
    fused = [_fuse(g, module, report) for g in changed]
    if all(a is b for a, b in zip(changed, fused, strict=True)):
        return module
    module = module.with_functions(*fused)
    called = {n.fn for g in fused for n in g.nodes if n.op in ("group", "call")}
    kept = {n: g for n, g in module.functions.items() if n not in bodies or n in called}
    return Module(kept, module.attrs)


def _fuse(graph: Graph, module: Module, report: PassReport) -> Graph:
    producers, uses = graph.producers(), graph.uses()
    routed: dict[Node, Node] = {}  # what makes the weights -> its topk
    plans: dict[Node, dict[str, Attr]] = {}
    sources: dict[Node, Value] = {}
    for node in graph.nodes:
        if node.op != "topk":
            continue
        values = node.outputs[0]
        before = _chain(producers.get(node.operand(0)), module)
        users = uses[values]
        last = users[0] if len(users) == 1 and values not in graph.outputs else None
        after = _chain(last, module)
        why = _refusal(node, before, after, uses, graph)
        if why is None:
            plan = _plan(before, after, last)
            if isinstance(plan, str):
                why = plan
            else:
                assert last is not None
                first = plan["softmax"] == "before"
                assert before is not None or not first
                plans[node] = plan
                sources[node] = before.source if first and before is not None else node.operand(0)
                routed[last] = node
                report.match()
        if why is not None:
            report.miss(node, why)
    if not plans:
        return graph
    r = Rewriter(graph, by=BY)

    def visit(_: Rewriter, node: Node) -> tuple[Value, ...] | None:
        if node in routed:
            return (r.get(routed[node].outputs[0]),)
        if node not in plans:
            return None
        attrs = {"k": node.integer("k"), **plans[node]}
        return r.emit_node("route", (r.get(sources[node]),), attrs, name=node.outputs[0].name)

    return r.run(visit)


def _chain(node: Node | None, module: Module) -> _Chain | None:
    """What a node with one operand and one result does; None for any other."""
    if node is None or len(node.outputs) != 1:
        return None
    if node.op != "group":
        return _Chain(node.operand(0), (node,)) if node.inputs and node.inputs[0] is not None else None
    body = module.functions[node.fn]
    if len(body.inputs) != 1 or body.outputs != body.nodes[-1].outputs:
        return None
    return _Chain(node.operand(0), body.nodes)


def _refusal(
    node: Node, before: _Chain | None, after: _Chain | None, uses: dict[Value, list[Node]], graph: Graph
) -> str | None:
    if node.outputs[0].tensor.rank != 2 or not isinstance(node.operand(0).shape[-1], int):
        return f"topk takes {node.operand(0).type}, not rows of experts"
    if after is None:
        values = node.outputs[0]
        if values in graph.outputs or len(uses[values]) != 1:
            readers = " and ".join(n.op for n in uses[values]) or "nobody"
            return f"%{values.name} is read by {readers}" + (
                ", and returned" if values in graph.outputs else ""
            )
        return f"{uses[values][0].op} takes more than %{values.name}"
    return None


def _plan(before: _Chain | None, after: _Chain | None, last: Node | None) -> dict[str, Attr] | str:
    """Attributes of the route, or why there is none."""
    assert after is not None and last is not None
    dtype = last.output.dtype
    if after.ops in ("softmax", "softmax cast"):
        return (
            {"softmax": "after", "dtype": dtype}
            if _on_rows(after.nodes[0])
            else "the softmax is not over a row"
        )
    if before is None or before.ops not in ("softmax", "cast softmax"):
        return f"the logits come from {before.ops if before else 'something'}, not from a softmax"
    softmax = before.nodes[-1]
    if softmax.output.dtype != "f32" or not _on_rows(softmax):
        return f"the softmax is {softmax.output.type} over axis {softmax.integer('axis')}, not f32 over a row"
    if after.ops == "cast":
        return {"softmax": "before", "dtype": dtype}
    if after.ops in ("sum div", "sum div cast") and _divides_by_sum(after):
        return {"softmax": "before", "normalise": True, "dtype": dtype}
    return f"the largest go through {after.ops}, which is no way to weights known here"


def _on_rows(node: Node) -> bool:
    return axis_of(node) == node.operand(0).tensor.rank - 1


def _divides_by_sum(chain: _Chain) -> bool:
    total, quotient = chain.nodes[0], chain.nodes[1]
    whole = total.inputs[0]
    return (
        _on_rows(total)
        and bool(total.attrs.get("keepdim"))
        and quotient.inputs == (whole, total.output)
        and not quotient.attrs.get("reverse")
    )
