"""Turn constant tensors into numbers, and fold factors into an attention's scale where that is exact.

Before::

    param %factor : f32[] = literal("f32", [], [0.125])
    %a = mul(%q, %factor) : bf16[T, 4, 64]
    %y = attention(%a, %k, %v, scale=1.0, causal=true) : bf16[T, 4, 64]

After::

    %y = attention(%q, %k, %v, scale=0.125, causal=true) : bf16[T, 4, 64]

A factor moves into the scale only if it is a power of two: any other would round q differently.
"""

import math

from compilerllm.ir.builder import Rewriter
from compilerllm.ir.graph import Attr, Graph, Node, Value
from compilerllm.ir.pattern import Matcher
from compilerllm.ir.recipe import Literal
from compilerllm.passes.opinfo import ARITHMETIC, same_graph
from compilerllm.passes.report import PassReport

_ATTENTION = frozenset(("attention", "paged_attention"))


def fold_scale(graph: Graph, report: PassReport) -> Graph:
    """One function with fewer constants."""
    constants = {
        p.value: p.recipe.values[0]
        for p in graph.params
        if isinstance(p.recipe, Literal) and p.value.tensor.rank == 0 and p.value.tensor.is_float
    }
    matcher = Matcher(graph)
    r = Rewriter(graph, by="fold_scale")

    def visit(_: Rewriter, node: Node) -> tuple[Value, ...] | None:
        if node.op in ARITHMETIC and len(node.operands) == 2:
            return _scalar(r, node, constants, report)
        if node.op in _ATTENTION:
            return _attention(r, node, matcher, report)
        return None

    new = r.run(visit)
    return same_graph(graph, new)


def _scalar(
    r: Rewriter, node: Node, constants: dict[Value, float], report: PassReport
) -> tuple[Value, ...] | None:
    """A rank-0 constant operand becomes the attribute 'scalar' (kernels compute with both in f32)."""
    a, b = node.operands
    if (b in constants) == (a in constants):
        return None
    x, constant = (a, b) if b in constants else (b, a)
    if not x.tensor.is_float or x.tensor.rank == 0 or x.type != node.output.type:
        return None
    attrs: dict[str, Attr] = {"scalar": constants[constant]}
    if x is b and node.op in ("sub", "div", "pow", "remainder", "floor_div"):
        attrs["reverse"] = True
    report.match()
    return r.emit_node(node.op, (r.get(x),), attrs, name=node.output.name)


def _attention(r: Rewriter, node: Node, matcher: Matcher, report: PassReport) -> tuple[Value, ...] | None:
    q = node.operands[0]
    producer = matcher.producers.get(q)
    if (
        producer is None
        or producer.op not in ("mul", "div")
        or "scalar" not in producer.attrs
        or producer.attrs.get("reverse")
    ):
        return None
    factor = producer.number("scalar")
    factor = 1 / factor if producer.op == "div" and factor else factor
    if factor <= 0 or math.frexp(factor)[0] != 0.5:
        report.miss(node, f"q is multiplied by {factor}, no power of two: folding it would round differently")
        return None
    if not matcher.used_once(q):
        report.miss(node, f"%{q.name} has other uses")
        return None
    report.match()
    operands = [r.get(producer.operands[0]), *(None if v is None else r.get(v) for v in node.inputs[1:])]
    attrs = {**node.attrs, "scale": node.number("scale") * factor}
    return r.emit_node(node.op, operands, attrs, name=node.output.name)
