"""Lowering rules for matrix products, embeddings, norms, and the semantic operators a capture put in."""

from typing import Any

from torch import fx

from compilerllm.ir.graph import Value
from compilerllm.kernels.launch.dtypes import IR_DTYPES
from compilerllm.models.lower import Lowering, Result, rule


@rule("aten.embedding.default")
def _embedding(low: Lowering, node: fx.Node) -> Result | None:
    table, ids = low.weight(low.arg(node, 0)), low.value(low.arg(node, 1))
    attrs: dict[str, Any] = {"dtype": low.type(node).dtype} if table.tensor.is_quantized else {}
    return low.b.emit("embedding", ids, table, **attrs)


@rule("aten.linear.default")
def _linear(low: Lowering, node: fx.Node) -> Result | None:
    bias = low.arg(node, 2, "bias")
    x, weight = low.value(low.arg(node, 0)), low.weight(low.arg(node, 1))
    return low.b.emit("linear", x, weight, None if bias is None else low.value(bias))


def _matrix(low: Lowering, argument: Any) -> Value | None:
    """The [N, K] weight whose transpose ``argument`` is, or None where it is an ordinary matrix.

    A weight has fixed extents: a product with transposed activations (their tokens are dynamic) stays a product.
    """
    source = low.sources.get(argument)
    if source is not None and source.constant is None and low.type(argument).rank == 2:
        return low.permuted(argument, (1, 0))
    found = low.untransposed.get(low.value(argument))
    return found if found is not None and all(isinstance(d, int) for d in found.shape) else None


@rule("aten.mm.default")
def _mm(low: Lowering, node: fx.Node) -> Result | None:
    x, weight = low.value(low.arg(node, 0)), _matrix(low, low.arg(node, 1))
    if weight is not None:
        return low.b.emit("linear", x, weight)
    return low.b.emit("matmul", x, low.value(low.arg(node, 1)))


@rule("aten.addmm.default")
def _addmm(low: Lowering, node: fx.Node) -> Result | None:
    if low.arg(node, 3, "beta", 1) != 1 or low.arg(node, 4, "alpha", 1) != 1:
        return None
    bias, x, weight = low.value(low.arg(node, 0)), low.value(low.arg(node, 1)), _matrix(low, low.arg(node, 2))
    if weight is not None and bias.shape == weight.shape[:1]:
        return low.b.emit("linear", x, weight, bias)
    return low.b.emit("add", low.b.emit("matmul", x, low.value(low.arg(node, 2))), bias)


@rule("aten.bmm.default", "aten.matmul.default")
def _matmul(low: Lowering, node: fx.Node) -> Result | None:
    if str(node.target) == "aten.matmul.default" and (weight := _matrix(low, low.arg(node, 1))) is not None:
        return low.b.emit("linear", low.value(low.arg(node, 0)), weight)
    a, b = low.value(low.arg(node, 0)), low.value(low.arg(node, 1))
    return low.b.emit("matmul", a, b) if min(a.tensor.rank, b.tensor.rank) >= 2 else None


@rule("aten.layer_norm.default")
def _layer_norm(low: Lowering, node: fx.Node) -> Result | None:
    if len(low.arg(node, 1)) != 1:
        return None
    params = [low.arg(node, 2, "weight"), low.arg(node, 3, "bias")]
    values = [None if p is None else low.value(p) for p in params]
    return low.b.emit(
        "layer_norm", low.value(low.arg(node, 0)), *values, eps=float(low.arg(node, 4, "eps", 1e-5))
    )


@rule("aten.rms_norm.default")
def _rms_norm(low: Lowering, node: fx.Node) -> Result | None:
    weight, eps = low.arg(node, 2, "weight"), low.arg(node, 3, "eps")
    if len(low.arg(node, 1)) != 1 or eps is None:
        return None
    return low.b.emit(
        "rms_norm", low.value(low.arg(node, 0)), None if weight is None else low.value(weight), eps=float(eps)
    )


# Ours


@rule("compilerllm.rms_norm.default")
def _our_rms_norm(low: Lowering, node: fx.Node) -> Result | None:
    x, weight, eps, offset, round_first = (low.arg(node, i) for i in range(len(node.args)))
    attrs: dict[str, Any] = {"eps": eps} | ({"offset": offset} if offset else {})
    if round_first and weight is not None:
        attrs["round_first"] = True
    return low.b.emit("rms_norm", low.value(x), None if weight is None else low.value(weight), **attrs)


@rule("compilerllm.layer_norm.default")
def _our_layer_norm(low: Lowering, node: fx.Node) -> Result | None:
    x, weight, bias, eps, round_first = (low.arg(node, i) for i in range(len(node.args)))
    values = [None if p is None else low.value(p) for p in (weight, bias)]
    attrs: dict[str, Any] = {"eps": eps} | (
        {"round_first": True} if round_first and weight is not None else {}
    )
    return low.b.emit("layer_norm", low.value(x), *values, **attrs)


@rule("compilerllm.rotary_table.default")
def _rotary_table(low: Lowering, node: fx.Node) -> Result | None:
    positions, frequencies, layout, dtype, scaling = (low.arg(node, i) for i in range(len(node.args)))
    attrs: dict[str, Any] = {"layout": layout, "dtype": IR_DTYPES[dtype]}
    if scaling != 1.0:
        attrs["scaling"] = scaling
    cos, sin = low.b.emit_many(
        "rotary_table", low.value(positions), low.value(frequencies), name="cos", **attrs
    )
    return cos, sin


@rule("compilerllm.rope.default")
def _rope(low: Lowering, node: fx.Node) -> Result | None:
    x, cos, sin, style, head_axis, half_width, f32 = (low.arg(node, i) for i in range(len(node.args)))
    attrs: dict[str, Any] = {"style": style, "head_axis": head_axis}
    attrs |= ({"half_width": True} if half_width else {}) | ({"f32": True} if f32 else {})
    return low.b.emit("rope", low.value(x), low.value(cos), low.value(sin), **attrs)


@rule("compilerllm.attention.default")
def _attention(low: Lowering, node: fx.Node) -> Result | None:
    q, k, v, sinks, scale, causal, window, softcap = (low.arg(node, i) for i in range(len(node.args)))
    attrs: dict[str, Any] = {"scale": scale, "causal": causal}
    attrs |= ({"window": window} if window else {}) | ({"softcap": softcap} if softcap else {})
    values = [low.value(t) for t in (q, k, v)]
    return low.b.emit("attention", *values, None if sinks is None else low.value(sinks), **attrs)


@rule("compilerllm.experts.default")
def _experts(low: Lowering, node: fx.Node) -> Result | None:
    x, ids, weights, gate_up, down, gate_bias, down_bias, act, interleaved, transposed, limit, alpha = (
        low.arg(node, i) for i in range(len(node.args))
    )
    matrices = [low.permuted(w, (0, 2, 1)) if transposed else low.value(w) for w in (gate_up, down)]
    biases = [None if b is None else low.value(b) for b in (gate_bias, down_bias)]
    attrs: dict[str, Any] = {"act": act} | ({"interleaved": True} if interleaved else {})
    if act == "gpt_oss":
        attrs |= {"limit": limit, "alpha": alpha}
    return low.b.emit(
        "experts", low.value(x), low.value(ids), low.value(weights), *matrices, *biases, **attrs
    )
