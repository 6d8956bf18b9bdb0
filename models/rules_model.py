"""Lowering rules for matrix products, embeddings, norms, and the semantic operators a capture put in."""

from typing import Any

from torch import fx

from compilerllm.ir.graph import Value
from compilerllm.models.lower import DTYPES, Lowering, Result, rule


@rule("aten.embedding.default")
def _embedding(low: Lowering, node: fx.Node) -> Result | None:
    table, ids = low.weight(node.args[0]), low.value(node.args[1])  # type: ignore[arg-type]
    attrs: dict[str, Any] = {"dtype": low.type(node).dtype} if table.tensor.is_quantized else {}
    return low.b.emit("embedding", ids, table, **attrs)


@rule("aten.linear.default")
def _linear(low: Lowering, node: fx.Node) -> Result | None:
    bias = low.arg(node, 2, "bias")
    x, weight = low.value(node.args[0]), low.weight(node.args[1])  # type: ignore[arg-type]
    return low.b.emit("linear", x, weight, None if bias is None else low.value(bias))


def _matrix(low: Lowering, argument: Any) -> Value | None:
    """The [N, K] weight whose transpose ``argument`` is, or None where it is an ordinary matrix."""
    if argument in low.sources and low.sources[argument].constant is None:
        return low.permuted(argument, (1, 0))
    return low.untransposed.get(low.value(argument))


@rule("aten.mm.default")
def _mm(low: Lowering, node: fx.Node) -> Result | None:
    x, weight = low.value(node.args[0]), _matrix(low, node.args[1])
    if weight is not None:
        return low.b.emit("linear", x, weight)
    return low.b.emit("matmul", x, low.value(node.args[1]))


@rule("aten.addmm.default")
def _addmm(low: Lowering, node: fx.Node) -> Result | None:
    if low.arg(node, 3, "beta", 1) != 1 or low.arg(node, 4, "alpha", 1) != 1:
        return None
    bias, x, weight = low.value(node.args[0]), low.value(node.args[1]), _matrix(low, node.args[2])
    if weight is not None and bias.shape == weight.shape[:1]:
        return low.b.emit("linear", x, weight, bias)
    return low.b.emit("add", low.b.emit("matmul", x, low.value(node.args[2])), bias)


@rule("aten.bmm.default", "aten.matmul.default")
def _matmul(low: Lowering, node: fx.Node) -> Result | None:
    a, b = low.value(node.args[0]), low.value(node.args[1])
    return low.b.emit("matmul", a, b) if min(a.tensor.rank, b.tensor.rank) >= 2 else None


@rule("aten.layer_norm.default")
def _layer_norm(low: Lowering, node: fx.Node) -> Result | None:
    if len(node.args[1]) != 1:  # type: ignore[arg-type]
        return None
    params = [low.arg(node, 2, "weight"), low.arg(node, 3, "bias")]
    values = [None if p is None else low.value(p) for p in params]
    return low.b.emit("layer_norm", low.value(node.args[0]), *values, eps=float(low.arg(node, 4, "eps", 1e-5)))


@rule("aten.rms_norm.default")
def _rms_norm(low: Lowering, node: fx.Node) -> Result | None:
    weight, eps = low.arg(node, 2, "weight"), low.arg(node, 3, "eps")
    if len(node.args[1]) != 1 or eps is None:  # type: ignore[arg-type]
        return None
    return low.b.emit("rms_norm", low.value(node.args[0]), None if weight is None else low.value(weight), eps=float(eps))


# Ours


@rule("compilerllm.rms_norm.default")
def _our_rms_norm(low: Lowering, node: fx.Node) -> Result | None:
    x, weight, eps, offset, round_first = node.args
    attrs: dict[str, Any] = {"eps": eps} | ({"offset": offset} if offset else {})
    if round_first and weight is not None:
        attrs["round_first"] = True
    return low.b.emit("rms_norm", low.value(x), None if weight is None else low.value(weight), **attrs)


@rule("compilerllm.layer_norm.default")
def _our_layer_norm(low: Lowering, node: fx.Node) -> Result | None:
    x, weight, bias, eps, round_first = node.args
    values = [None if p is None else low.value(p) for p in (weight, bias)]
    attrs: dict[str, Any] = {"eps": eps} | ({"round_first": True} if round_first and weight is not None else {})
    return low.b.emit("layer_norm", low.value(x), *values, **attrs)


@rule("compilerllm.rotary_table.default")
def _rotary_table(low: Lowering, node: fx.Node) -> Result | None:
    positions, frequencies, layout, dtype, scaling = node.args
    attrs: dict[str, Any] = {"layout": layout, "dtype": DTYPES[dtype]}  # type: ignore[index]
    if scaling != 1.0:
        attrs["scaling"] = scaling
    cos, sin = low.b.emit_many(
        "rotary_table", low.value(positions), low.value(frequencies), name="cos", **attrs
    )
    return cos, sin


@rule("compilerllm.rope.default")
def _rope(low: Lowering, node: fx.Node) -> Result | None:
    x, cos, sin, style, head_axis, half_width, f32 = node.args
    attrs: dict[str, Any] = {"style": style, "head_axis": head_axis}
    attrs |= ({"half_width": True} if half_width else {}) | ({"f32": True} if f32 else {})
    return low.b.emit("rope", low.value(x), low.value(cos), low.value(sin), **attrs)


@rule("compilerllm.attention.default")
def _attention(low: Lowering, node: fx.Node) -> Result | None:
    q, k, v, sinks, scale, causal, window, softcap = node.args
    attrs: dict[str, Any] = {"scale": scale, "causal": causal}
    attrs |= ({"window": window} if window else {}) | ({"softcap": softcap} if softcap else {})
    values = [low.value(t) for t in (q, k, v)]
    return low.b.emit("attention", *values, None if sinks is None else low.value(sinks), **attrs)


@rule("compilerllm.experts.default")
def _experts(low: Lowering, node: fx.Node) -> Result | None:
    x, ids, weights, gate_up, down, gate_bias, down_bias, act, interleaved, transposed, limit, alpha = node.args
    matrices = [low.permuted(w, (0, 2, 1)) if transposed else low.value(w) for w in (gate_up, down)]  # type: ignore[arg-type]
    biases = [None if b is None else low.value(b) for b in (gate_bias, down_bias)]
    attrs: dict[str, Any] = {"act": act} | ({"interleaved": True} if interleaved else {})
    if act == "gpt_oss":
        attrs |= {"limit": limit, "alpha": alpha}
    return low.b.emit("experts", low.value(x), low.value(ids), low.value(weights), *matrices, *biases, **attrs)


