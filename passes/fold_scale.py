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

_ATTENTION = frozenset(("attention", "paged_attention", "varlen_attention"))
# What a power of two passes through unchanged: q may be reshaped and rotated between the product and the attention.
_LINEAR_OPS = frozenset(("reshape", "permute", "rope"))


def fold_scale(graph: Graph, report: PassReport) -> Graph:
    """One function with fewer constants."""
    constants = {
        p.value: p.recipe.values[0]
        for p in graph.params
        if isinstance(p.recipe, Literal) and p.value.tensor.rank == 0 and p.value.tensor.is_float
    }
    matcher = Matcher(graph)
    factors: dict[Node, float] = {}  # attention -> what its q was multiplied by
    dropped: dict[Node, Value] = {}  # the product -> what was multiplied
    for node in graph.nodes:
        if node.op in _ATTENTION and (found := _product(node, matcher, constants, report)) is not None:
            product, x, factors[node] = found
            dropped[product] = x
            report.match()
    r = Rewriter(graph, by="fold_scale")

    def visit(_: Rewriter, node: Node) -> tuple[Value, ...] | None:
        if node in dropped:
            return (r.get(dropped[node]),)
        if node in factors:
            operands = [None if v is None else r.get(v) for v in node.inputs]
            attrs = {**node.attrs, "scale": node.number("scale") * factors[node]}
            return r.emit_node(node.op, operands, attrs, name=node.output.name)
        if node.op in ARITHMETIC and len(node.operands) == 2:
            return _scalar(r, node, constants, report)
        return None

    return same_graph(graph, r.run(visit))


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
    swapped = (x is b) != bool(node.attrs.get("reverse"))
    if swapped and node.op in ("sub", "div", "pow", "remainder", "floor_div"):
        attrs["reverse"] = True
    report.match()
    return r.emit_node(node.op, (r.get(x),), attrs, name=node.output.name)


def _product(
    attention: Node, matcher: Matcher, constants: dict[Value, float], report: PassReport
) -> tuple[Node, Value, float] | None:
    """The node that multiplies q by a number, what it multiplies, and the number; None where it cannot be folded."""
    value = attention.operands[0]
    while (
        (node := matcher.producers.get(value)) is not None
        and node.op in _LINEAR_OPS
        and matcher.used_once(value)
    ):
        value = node.operands[0]
    if node is None or node.op not in ("mul", "div") or node.attrs.get("reverse"):
        return None
    x, number = _factor(node, constants)
    if x is None or not number or x.type != value.type:
        return None
    factor = 1 / number if node.op == "div" else number
    if factor <= 0 or math.frexp(factor)[0] != 0.5:
        report.miss(
            attention, f"q is multiplied by {factor}, no power of two: folding it would round differently"
        )
        return None
    if not matcher.used_once(value):
        report.miss(attention, matcher.who_else(value, attention))
        return None
    return node, x, factor


def _factor(node: Node, constants: dict[Value, float]) -> tuple[Value | None, float]:
    if "scalar" in node.attrs:
        return node.operands[0], node.number("scalar")
    a, b = node.operands
    if b in constants:
        return a, constants[b]
    return (b, constants[a]) if a in constants and node.op == "mul" else (None, 0.0)
