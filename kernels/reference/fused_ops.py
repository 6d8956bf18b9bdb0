"""References of fused forms: each is written as the ops it replaces, so that its roundings are theirs."""

from torch import Tensor

from compilerllm.kernels.launch.dtypes import TORCH_DTYPES
from compilerllm.kernels.reference.model_ops import (
    activate,
    gate_times_up,
    layer_norm,
    linear,
    rms_norm,
    rope,
    topk,
)
from compilerllm.kernels.reference.registry import reference
from compilerllm.kernels.reference.serving_ops import kv_write, paged_attention
from compilerllm.kernels.reference.states import State, Step


@reference("add_rms_norm")
def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    *,
    eps: float,
    offset: float = 0.0,
    round_first: bool = False,
) -> tuple[Tensor, Tensor]:
    total = x + residual
    return rms_norm(total, weight, eps=eps, offset=offset, round_first=round_first), total


@reference("add_layer_norm")
def add_layer_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    eps: float,
    round_first: bool = False,
) -> tuple[Tensor, Tensor]:
    total = x + residual
    return layer_norm(total, weight, bias, eps=eps, round_first=round_first), total


@reference("gated_act_packed")
def gated_act_packed(x: Tensor, *, act: str) -> Tensor:
    gate, up = x.chunk(2, -1)
    return gate_times_up(gate, up, act)


@reference("linear_gated")
def linear_gated(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, act: str) -> Tensor:
    return gated_act_packed(linear(x, weight, bias), act=act)


@reference("linear_act")
def linear_act(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, act: str) -> Tensor:
    return activate(linear(x, weight, bias), act)


@reference("linear_add")
def linear_add(x: Tensor, weight: Tensor, residual: Tensor, bias: Tensor | None = None) -> Tensor:
    return linear(x, weight, bias) + residual


@reference("qkv_rope_write")
def qkv_rope_write(
    state: State,
    qkv: Tensor,
    step: Step,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    *,
    heads: int,
    style: str = "half",
    half_width: bool = False,
    f32: bool = False,
    eps: float = 0.0,
    offset: float = 0.0,
    round_first: bool = False,
) -> Tensor:
    """qkv [T, (heads + 2 * key heads) * D] gives q [T, heads, D]; k and v go to the state."""
    kv_heads, dim = state.type["heads"], state.type["dim"]
    rows = qkv.reshape(qkv.shape[0], heads + 2 * kv_heads, dim)
    q, k, v = rows[:, :heads], rows[:, heads : heads + kv_heads], rows[:, heads + kv_heads :]
    if q_norm is not None:
        q = rms_norm(q, q_norm, eps=eps, offset=offset, round_first=round_first)
    if k_norm is not None:
        k = rms_norm(k, k_norm, eps=eps, offset=offset, round_first=round_first)
    if cos is not None and sin is not None:
        q = rope(q, cos, sin, style=style, head_axis=-2, half_width=half_width, f32=f32)
        k = rope(k, cos, sin, style=style, head_axis=-2, half_width=half_width, f32=f32)
    kv_write(state, k, v, step)
    return q.contiguous()


@reference("qkv_attention")
def qkv_attention(
    state: State,
    qkv: Tensor,
    step: Step,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    sinks: Tensor | None = None,
    *,
    heads: int,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    style: str = "half",
    half_width: bool = False,
    f32: bool = False,
    eps: float = 0.0,
    offset: float = 0.0,
    round_first: bool = False,
) -> Tensor:
    q = qkv_rope_write(
        state, qkv, step, cos, sin, q_norm, k_norm, heads=heads, style=style, half_width=half_width, f32=f32, eps=eps,
        offset=offset, round_first=round_first,
    )  # fmt: skip
    return paged_attention(q, state, step, sinks, scale=scale, window=window, softcap=softcap)


@reference("route")
def route(
    logits: Tensor, *, k: int, softmax: str, dtype: str, normalise: bool = False
) -> tuple[Tensor, Tensor]:
    if softmax == "after":
        values, ids = topk(logits, k=k)
        return values.softmax(-1).to(TORCH_DTYPES[dtype]), ids
    values, ids = topk(logits.float().softmax(-1), k=k)
    if normalise:
        values = values / values.sum(-1, keepdim=True)
    return values.to(TORCH_DTYPES[dtype]), ids


@reference("norm_linear")
def norm_linear(
    x: Tensor, residual: Tensor, norm_weight: Tensor, weight: Tensor, bias: Tensor | None = None, *, eps: float,
    offset: float = 0.0, round_first: bool = False, out_dtype: str | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    normed, total = add_rms_norm(x, residual, norm_weight, eps=eps, offset=offset, round_first=round_first)
    return linear(normed, weight, bias, out_dtype=out_dtype), total


@reference("norm_linear_gated")
def norm_linear_gated(
    x: Tensor, residual: Tensor, norm_weight: Tensor, weight: Tensor, bias: Tensor | None = None, *, act: str,
    eps: float, offset: float = 0.0, round_first: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    normed, total = add_rms_norm(x, residual, norm_weight, eps=eps, offset=offset, round_first=round_first)
    return linear_gated(normed, weight, bias, act=act), total


@reference("norm_route")
def norm_route(
    x: Tensor, residual: Tensor, norm_weight: Tensor, weight: Tensor, bias: Tensor | None = None, *, eps: float, k: int,
    softmax: str, dtype: str, offset: float = 0.0, round_first: bool = False, normalise: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    normed, total = add_rms_norm(x, residual, norm_weight, eps=eps, offset=offset, round_first=round_first)
    weights, ids = route(linear(normed, weight, bias), k=k, softmax=softmax, dtype=dtype, normalise=normalise)
    return normed, total, weights, ids
