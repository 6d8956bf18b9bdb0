"""Ops a captured model is made of: embedding, linear, norms, rotary, attention, gated activations, experts."""

from compilerllm.ir.dims import Dim, product
from compilerllm.ir.graph import Node
from compilerllm.ir.op import OpCall, Reduction, define, elementwise_flops
from compilerllm.ir.types import TensorType

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "relu2", "sigmoid", "identity", "gpt_oss")


def linear_flops(node: Node) -> Dim:
    """2 * rows * N * K."""
    x, weight = node.operand(0), node.operand(1)
    return 2 * product(x.shape[:-1]) * weight.shape[0] * weight.shape[1]


def check_linear(call: OpCall, x: TensorType, weight: TensorType, bias: TensorType | None) -> TensorType:
    """Shared by every op with a [N, K] weight. Returns the result's type."""
    call.require(weight.rank == 2, f"weight must be [N, K], but is {weight}")
    call.same(x.shape[-1], weight.shape[1], "K of x and of the weight")
    call.require(weight.is_quantized or weight.dtype == x.dtype, f"x is {x.dtype}, the weight {weight.dtype}")
    if bias is not None:
        call.require(bias.shape == (weight.shape[0],), f"bias must be [{weight.shape[0]}], but is {bias}")
    return x.with_shape(*x.shape[:-1], weight.shape[0])


def _embedding(call: OpCall) -> tuple[TensorType, ...]:
    ids, table = call["ids"], call["table"]
    call.require(ids.dtype in ("i32", "i64"), f"ids must be whole numbers, but are {ids.dtype}")
    call.require(table.rank == 2, f"table must be [V, K], but is {table}")
    dtype = call.text("dtype", table.dtype)
    call.require(
        not TensorType(dtype, ()).is_quantized, "a packed table needs attribute 'dtype' for the result"
    )
    return (TensorType(dtype, (*ids.shape, table.shape[1])),)


def _linear(call: OpCall) -> tuple[TensorType, ...]:
    result = check_linear(call, call["x"], call["weight"], call.optional("bias"))
    return (result.with_dtype(call.text("out_dtype", result.dtype)),)


define("embedding(ids, table)", "rows of a table", _embedding, attrs="dtype?")
define(
    "linear(x, weight, bias?)", "x times the transposed weight [N, K], f32 accumulation; the weight may be packed",
    _linear, attrs="out_dtype?", flops=linear_flops, reduction=Reduction.CONTRACTION,
)  # fmt: skip


def check_norm(call: OpCall, x: TensorType) -> TensorType:
    """The type of x, after its weight and bias, where the op has them, were found to fit its last axis."""
    for name in ("weight", "bias"):
        if any(o.name == name for o in call.op.operands) and (p := call.optional(name)) is not None:
            call.require(p.shape == (x.shape[-1],), f"{name} must be [{x.shape[-1]}], but is {p}")
    return x


def _norm(call: OpCall) -> tuple[TensorType, ...]:
    return (check_norm(call, call["x"]),)


# round_first: the normalised value is rounded to x's dtype before the weight multiplies it (llama); without it the
# product is rounded once (gpt_oss, gemma). offset is added to the weight (1 in gemma).
define(
    "rms_norm(x, weight?)", "x / sqrt(mean(x^2) + eps) * (offset + weight) over the last axis, inside in f32", _norm,
    attrs="eps, offset?, round_first?", flops=lambda n: 4 * n.output.tensor.numel, reduction=Reduction.ROW,
)  # fmt: skip
define(
    "layer_norm(x, weight?, bias?)", "(x - mean) / sqrt(var + eps) * weight + bias over the last axis, inside in f32",
    _norm, attrs="eps, round_first?", flops=lambda n: 7 * n.output.tensor.numel, reduction=Reduction.ROW,
)  # fmt: skip


def _rotary_table(call: OpCall) -> tuple[TensorType, ...]:
    positions, freq = call["positions"], call["inv_freq"]
    call.require(freq.rank == 1, f"inv_freq must be [D/2], but is {freq}")
    width = freq.shape[0] * (1 if call.text("layout") == "half_width" else 2)
    call.require(
        call.text("layout") in ("half", "half_width", "repeat"), f"unknown layout {call.text('layout')!r}"
    )
    result = TensorType(call.text("dtype"), (*positions.shape, width))
    return result, result


# layout: half = frequencies twice in a row (llama); repeat = each twice (glm); half_width = once (gpt_oss).
define(
    "rotary_table(positions, inv_freq)", "cos and sin of position * frequency, in f32, times scaling, then rounded",
    _rotary_table, attrs="layout, dtype, scaling?", flops=elementwise_flops,
)  # fmt: skip


def _rope(call: OpCall) -> tuple[TensorType, ...]:
    x, cos = call["x"], call["cos"]
    call.require(call.text("style") in ("half", "interleaved"), f"unknown style {call.text('style')!r}")
    call.require(x.rank >= 2, f"x must be [..., T, H, D] or [..., H, T, D], but is {x}")
    call.require(
        call.attrs.get("head_axis") in (-2, -3), "head_axis must be -2 ([T, H, D]) or -3 ([H, T, D])"
    )
    width = cos.shape[-1] * (2 if call.attrs.get("half_width") else 1)
    if isinstance(width, int) and isinstance(x.shape[-1], int):
        call.require(width <= x.shape[-1], f"table is {width} wide, x only {x.shape[-1]}")
    return (x,)


# The first columns, as many as the table is wide, are rotated; the rest pass. f32: computed in f32 and rounded once,
# otherwise each product and sum is rounded to x's dtype, as the eager model does.
define(
    "rope(x, cos, sin)", "rotate pairs of columns: (i, i + D/2) for half, (2i, 2i + 1) for interleaved", _rope,
    attrs="style, head_axis, half_width?, f32?", flops=lambda n: 3 * n.output.tensor.numel,
)  # fmt: skip


def _attention(call: OpCall) -> tuple[TensorType, ...]:
    q, k, v = call["q"], call["k"], call["v"]
    call.require(
        q.rank == 3 and k.rank == 3 and v.rank == 3, f"q, k, v must be [T, H, D], but are {q}, {k}, {v}"
    )
    call.same(q.shape[2], k.shape[2], "D of q and k")
    call.same(k.shape[1], v.shape[1], "heads of k and v")
    heads, kv = q.shape[1], k.shape[1]
    if isinstance(heads, int) and isinstance(kv, int):
        call.require(heads % kv == 0, f"{heads} heads do not share {kv} key heads")
    if (sinks := call.optional("sinks")) is not None:
        call.require(sinks.shape == (heads,), f"sinks must be [{heads}], but are {sinks}")
    return (q.with_shape(q.shape[0], q.shape[1], v.shape[2]),)


def attention_flops(node: Node) -> Dim:
    """4 * T * T * H * D, causality not counted (the context of a step is not in the types)."""
    q = node.operand(0)
    return 4 * q.tensor.numel * q.shape[0]


# window counts tokens including the query itself; 0 or absent = none. Scores: scale * qk, then softcap, then mask.
define(
    "attention(q, k, v, sinks?)", "softmax(scale * q k^T) v for the tokens of one sequence; heads share keys (GQA)",
    _attention, attrs="scale, causal, window?, softcap?", flops=attention_flops, reduction=Reduction.CONTEXT,
)  # fmt: skip


def _gated(call: OpCall) -> tuple[TensorType, ...]:
    gate, up = call["gate"], call["up"]
    call.require(gate == up, f"gate {gate} and up {up} differ")
    call.require(call.text("act") in ACTIVATIONS, f"unknown activation {call.text('act')!r}")
    return (gate,)


define(
    "gated_act(gate, up)", "act(gate) * up, act rounded before the product", _gated, attrs="act",
    flops=lambda n: 6 * n.output.tensor.numel,
)  # fmt: skip
define(
    "softcap(x)",
    "cap * tanh(x / cap)",
    lambda call: (call["x"],),
    attrs="cap",
    flops=lambda n: 3 * n.output.tensor.numel,
)


def _experts(call: OpCall) -> tuple[TensorType, ...]:
    x, ids, weights = call["x"], call["ids"], call["weights"]
    gate_up, down = call["gate_up"], call["down"]
    call.require(x.rank == 2 and ids.rank == 2, f"x must be [T, K] and ids [T, top], but are {x}, {ids}")
    call.require(ids.shape == weights.shape, f"ids {ids} and weights {weights} differ in shape")
    call.require(gate_up.rank == 3 and down.rank == 3, "expert weights must be [E, N, K]")
    call.same(gate_up.shape[2], x.shape[1], "K of x and gate_up")
    call.same(down.shape[1], x.shape[1], "K of x and rows of down")
    call.require(call.text("act") in ACTIVATIONS, f"unknown activation {call.text('act')!r}")
    return (x,)


def expert_flops(node: Node) -> Dim:
    """2 * T * top * (gate_up + down elements of one expert)."""
    ids, gate_up, down = node.operand(1), node.operand(3), node.operand(4)
    return 2 * ids.tensor.numel * (gate_up.shape[1] * gate_up.shape[2] + down.shape[1] * down.shape[2])


# Weights are [E, N, K] whatever the checkpoint's orientation (a recipe permutes). interleaved: gate rows are 0, 2, 4..
# and up rows 1, 3, 5.. (gpt_oss); otherwise the first half is gate. act gpt_oss clamps by limit, alpha is its slope.
define(
    "experts(x, ids, weights, gate_up, down, gate_up_bias?, down_bias?)",
    "sum over a token's experts of weight * down(act(gate) * up)", _experts,
    attrs="act, interleaved?, limit?, alpha?", flops=expert_flops, reduction=Reduction.CONTRACTION,
)  # fmt: skip


def _topk(call: OpCall) -> tuple[TensorType, ...]:
    x = call["x"]
    k = call.integer("k")
    call.require(k >= 1, f"k must be at least 1, but is {k}")
    shape = (*x.shape[:-1], k)
    return TensorType(x.dtype, shape), TensorType("i64", shape)


define(
    "topk(x)",
    "the k largest of the last axis, in descending order, and their indices",
    _topk,
    attrs="k",
    reduction=Reduction.ROW,
)
