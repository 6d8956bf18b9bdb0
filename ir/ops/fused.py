"""Forms that fusion passes make: each does exactly what the ops it replaces did, roundings included."""

from compilerllm.ir.dims import Dim, product, symbol
from compilerllm.ir.graph import Node
from compilerllm.ir.op import OpCall, Reduction, define
from compilerllm.ir.ops.model import ACTIVATIONS, check_linear, check_norm, linear_flops
from compilerllm.ir.ops.serving import state, step
from compilerllm.ir.types import TensorType


def _add_norm(call: OpCall) -> tuple[TensorType, ...]:
    x, residual = call["x"], call["residual"]
    call.require(x == residual, f"x {x} and residual {residual} differ")
    check_norm(call, x)
    return x, x


define(
    "add_rms_norm(x, residual, weight?)", "sum = x + residual; gives rms_norm(sum) and sum", _add_norm,
    attrs="eps, offset?, round_first?", flops=lambda n: 5 * n.outputs[0].tensor.numel, reduction=Reduction.ROW,
)  # fmt: skip
define(
    "add_layer_norm(x, residual, weight?, bias?)", "sum = x + residual; gives layer_norm(sum) and sum", _add_norm,
    attrs="eps, round_first?", flops=lambda n: 8 * n.outputs[0].tensor.numel, reduction=Reduction.ROW,
)  # fmt: skip


def _packed_gated(call: OpCall) -> tuple[TensorType, ...]:
    x = call["x"]
    width = x.shape[-1]
    call.require(isinstance(width, int) and width % 2 == 0, f"the last extent must be even, but is {width}")
    call.require(call.text("act") in ACTIVATIONS, f"unknown activation {call.text('act')!r}")
    assert isinstance(width, int)
    return (x.with_shape(*x.shape[:-1], width // 2),)


define(
    "gated_act_packed(x)", "act(first half of the row) * second half", _packed_gated, attrs="act",
    flops=lambda n: 6 * n.output.tensor.numel,
)  # fmt: skip


def _linear_gated(call: OpCall) -> tuple[TensorType, ...]:
    result = check_linear(call, call["x"], call["weight"], call.optional("bias"))
    width = result.shape[-1]
    call.require(
        isinstance(width, int) and width % 2 == 0, f"the weight must have an even number of rows, not {width}"
    )
    call.require(call.text("act") in ACTIVATIONS, f"unknown activation {call.text('act')!r}")
    assert isinstance(width, int)
    return (result.with_shape(*result.shape[:-1], width // 2),)


define(
    "linear_gated(x, weight, bias?)", "a linear whose first half of rows is gate, second up; gives act(gate) * up",
    _linear_gated, attrs="act", flops=linear_flops, reduction=Reduction.CONTRACTION,
)  # fmt: skip


def _linear_act(call: OpCall) -> tuple[TensorType, ...]:
    call.require(call.text("act") in ACTIVATIONS, f"unknown activation {call.text('act')!r}")
    return (check_linear(call, call["x"], call["weight"], call.optional("bias")),)


define(
    "linear_act(x, weight, bias?)", "act(linear(x))", _linear_act, attrs="act", flops=linear_flops,
    reduction=Reduction.CONTRACTION,
)  # fmt: skip


def _linear_add(call: OpCall) -> tuple[TensorType, ...]:
    result = check_linear(call, call["x"], call["weight"], call.optional("bias"))
    call.require(call["residual"] == result, f"residual {call['residual']} must be {result}")
    return (result,)


define(
    "linear_add(x, weight, residual, bias?)", "linear(x), rounded, plus residual", _linear_add, flops=linear_flops,
    reduction=Reduction.CONTRACTION,
)  # fmt: skip


def _qkv_rope_write(call: OpCall) -> tuple[TensorType, ...]:
    kv, qkv = state(call, "paged_kv"), call["qkv"]
    step(call)
    heads = call.integer("heads")
    dim, kv_heads = kv["dim"], kv["heads"]
    call.same(qkv.shape[-1], (heads + 2 * kv_heads) * dim, "width of qkv and (heads + 2 * key heads) * D")
    for name in ("q_norm", "k_norm"):
        if (weight := call.optional(name)) is not None:
            call.require(weight.shape == (dim,), f"{name} must be [{dim}], but is {weight}")
    if call.optional("cos") is not None:
        call.require(call.text("style") in ("half", "interleaved"), f"unknown style {call.text('style')!r}")
    return (qkv.with_shape(qkv.shape[0], heads, dim),)


# One row of qkv holds q heads, then k heads, then v heads. With q_norm and k_norm each head is rms-normed first.
define(
    "qkv_rope_write(state, qkv, step, cos?, sin?, q_norm?, k_norm?)",
    "split qkv, norm and rotate q and k, store k and v, give q", _qkv_rope_write,
    attrs="heads, style?, half_width?, f32?, eps?, offset?, round_first?", flops=lambda n: 8 * n.operand(1).tensor.numel,
    reduction=Reduction.ROW, writes_state=True,
)  # fmt: skip


def _qkv_attention(call: OpCall) -> tuple[TensorType, ...]:
    (out,) = _qkv_rope_write(call)
    heads, kv_heads = out.shape[1], state(call, "paged_kv")["heads"]
    call.require(isinstance(heads, int) and heads % kv_heads == 0, f"{heads} heads do not share {kv_heads}")
    if (sinks := call.optional("sinks")) is not None:
        call.require(sinks.shape == (heads,), f"sinks must be [{heads}], but are {sinks}")
    return (out,)


def _qkv_attention_flops(node: Node) -> Dim:
    """Those of qkv_rope_write, and 4 * T * C * H * D with C the mean context a token sees."""
    return 8 * node.operand(1).tensor.numel + 4 * node.output.tensor.numel * symbol("C")


# The rotated q is rounded, and keys and values are read as they are stored, as with the two ops apart.
define(
    "qkv_attention(state, qkv, step, cos?, sin?, q_norm?, k_norm?, sinks?)",
    "qkv_rope_write, then paged_attention of its q over the same state", _qkv_attention,
    attrs="heads, style?, half_width?, f32?, eps?, offset?, round_first?, scale, window?, softcap?",
    flops=_qkv_attention_flops, reduction=Reduction.CONTEXT, reads_state=True, writes_state=True,
)  # fmt: skip


def _route(call: OpCall) -> tuple[TensorType, ...]:
    logits, k = call["logits"], call.integer("k")
    call.require(k >= 1, f"k must be at least 1, but is {k}")
    call.require(
        call.text("softmax") in ("before", "after"),
        f"softmax is before or after, not {call.text('softmax')!r}",
    )
    shape = (*logits.shape[:-1], k)
    return TensorType(call.text("dtype"), shape), TensorType("i64", shape)


# softmax before: of all logits in f32, then the k largest, with normalise divided by their sum. After: of the k largest
# logits, in the logits' dtype. The weights are then rounded to dtype.
define(
    "route(logits)", "weights and indices of the k experts of each row, best first", _route,
    attrs="k, softmax, dtype, normalise?", flops=lambda n: 4 * n.operand(0).tensor.numel, reduction=Reduction.ROW,
)  # fmt: skip


def _norm_linear(call: OpCall) -> tuple[TensorType, ...]:
    x, residual = call["x"], call["residual"]
    call.require(x == residual, f"x {x} and residual {residual} differ")
    norm = call["norm_weight"]
    call.require(norm.shape == (x.shape[-1],), f"norm_weight must be [{x.shape[-1]}], but is {norm}")
    result = check_linear(call, x, call["weight"], call.optional("bias"))
    return result.with_dtype(call.text("out_dtype", result.dtype)), x


def _norm_linear_gated(call: OpCall) -> tuple[TensorType, ...]:
    _norm_linear(call)
    return *_linear_gated(call), call["x"]


def _norm_linear_flops(node: Node) -> Dim:
    """The linear's, the sum's and the norm's."""
    x, weight = node.operand(0), node.operand(3)
    return 2 * product(x.shape[:-1]) * weight.shape[0] * weight.shape[1] + 5 * x.tensor.numel


# What add_rms_norm gives goes to one linear alone; the sum is rounded to x's dtype as before. So is the norm, or a kernel
# scales after the product: what it multiplies with the linear's weight is the sum times the norm's, rounded to x's dtype
# once, and its result is multiplied by 1 / sqrt(mean square + eps), before any bias. Either is within roundings of x.
define(
    "norm_linear(x, residual, norm_weight, weight, bias?)", "sum = x + residual; gives linear(rms_norm(sum)) and sum",
    _norm_linear, attrs="eps, offset?, round_first?, out_dtype?", flops=_norm_linear_flops,
    reduction=Reduction.CONTRACTION,
)  # fmt: skip
define(
    "norm_linear_gated(x, residual, norm_weight, weight, bias?)",
    "sum = x + residual; gives linear_gated(rms_norm(sum)) and sum", _norm_linear_gated,
    attrs="act, eps, offset?, round_first?", flops=_norm_linear_flops, reduction=Reduction.CONTRACTION,
)  # fmt: skip


def _norm_route(call: OpCall) -> tuple[TensorType, ...]:
    x, residual, weight = call["x"], call["residual"], call["weight"]
    call.require(x == residual, f"x {x} and residual {residual} differ")
    check = call["norm_weight"]
    call.require(check.shape == (x.shape[-1],), f"norm_weight must be [{x.shape[-1]}], but is {check}")
    logits = check_linear(call, x, weight, call.optional("bias"))
    shape = (*logits.shape[:-1], call.integer("k"))
    return x, x, TensorType(call.text("dtype"), shape), TensorType("i64", shape)


define(
    "norm_route(x, residual, norm_weight, weight, bias?)",
    "sum = x + residual; gives rms_norm(sum), sum, and the route of the norm's linear", _norm_route,
    attrs="eps, offset?, round_first?, k, softmax, dtype, normalise?", flops=_norm_linear_flops,
    reduction=Reduction.CONTRACTION,
)  # fmt: skip
