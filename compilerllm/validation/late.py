"""What kernels compute that norm within a product and scale its sums: their own roundings, as a graph the reference runs.

x + residual, rounded, times the norm's weight is what goes into the product, rounded once; the f32 sums are multiplied by
1 / sqrt(mean square + eps). The separate norm rounds the scaled row, and with ``round_first`` the product with the weight
once more. Both are roundings of the operand, each of at most a unit roundoff, so results differ from the exact ones by at
most that many units of the sum of the products' magnitudes, beside the result's own rounding: a late scale by no more than
an early one. Bits are compared with this graph's, since against the other's any rounding left out would pass.
"""

from compilerllm.ir.builder import Rewriter
from compilerllm.ir.graph import Module, Node, Value

OPS = ("norm_linear", "norm_linear_gated")


def scaled_late(module: Module, rounds: bool) -> Module:
    """``module`` with the products after a norm scaled late. rounds: whether what goes into them is rounded, which it is
    not where one row's products are summed element by element."""

    def visit(r: Rewriter, node: Node) -> tuple[Value, ...] | None:
        return _scaled(r, node, rounds) if node.op in OPS else None

    return module.with_functions(Rewriter(module.main, by="scaled_late").run(visit))


def _scaled(r: Rewriter, node: Node, rounds: bool) -> tuple[Value, Value]:
    x, residual, norm_weight, weight = (r.get(v) for v in node.operands[:4])
    bias = node.input(4)
    total = r.emit("add", x, residual)
    wide, factor = _wide(r, total), _wide(r, norm_weight)
    if offset := node.number("offset", 0.0):
        factor = r.emit("add", factor, scalar=offset)
        if node.attrs.get("round_first"):
            factor = _wide(r, r.emit("cast", factor, dtype=norm_weight.dtype))
    operand = r.emit("mul", wide, factor)
    if rounds:
        operand = _wide(r, r.emit("cast", operand, dtype=x.dtype))
    sums = r.emit("linear", operand, _wide(r, weight))
    mean = r.emit("mean", r.emit("square", wide), axis=1, keepdim=True)
    scale = r.emit("rsqrt", r.emit("add", mean, scalar=node.number("eps")))
    sums = r.emit("mul", sums, scale)
    if bias is not None:
        sums = r.emit("add", sums, _wide(r, r.get(bias)))
    result = r.emit("cast", sums, dtype=node.text("out_dtype", x.dtype))
    if node.op == "norm_linear_gated":
        result = r.emit("gated_act_packed", result, act=node.text("act"))
    return result, total


def _wide(r: Rewriter, value: Value) -> Value:
    return value if value.dtype == "f32" else r.emit("cast", value, dtype="f32")
