"""References of what captured models are made of. Roundings are those of transformers' eager modules in bf16.

A weight may stand here in f32 beside narrower activations: that is a packed one, dequantised. The product is then
computed in f32 and rounded once.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from compilerllm.kernels.launch.dtypes import TORCH_DTYPES
from compilerllm.kernels.reference.registry import reference

GPT_OSS_ALPHA, GPT_OSS_LIMIT = 1.702, 7.0


def _relu2(x: Tensor) -> Tensor:
    return F.relu(x).square()


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu, "gelu": F.gelu, "gelu_tanh": _gelu_tanh, "relu": F.relu, "relu2": _relu2, "sigmoid": torch.sigmoid,
    "identity": lambda x: x,
}  # fmt: skip


@reference("embedding")
def embedding(ids: Tensor, table: Tensor, *, dtype: str | None = None) -> Tensor:
    rows = F.embedding(ids, table)
    return rows if dtype is None else rows.to(TORCH_DTYPES[dtype])


@reference("linear")
def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, out_dtype: str | None = None) -> Tensor:
    """[..., K] times [N, K] transposed, one rounding after the bias."""
    result_dtype = x.dtype if out_dtype is None else TORCH_DTYPES[out_dtype]
    if weight.dtype == x.dtype == result_dtype and (bias is None or bias.dtype == x.dtype):
        return F.linear(x, weight, bias)
    wide = F.linear(x.float(), weight.float(), None if bias is None else bias.float())
    return wide.to(result_dtype)


@reference("rms_norm")
def rms_norm(
    x: Tensor, weight: Tensor | None = None, *, eps: float, offset: float = 0.0, round_first: bool = False
) -> Tensor:
    wide = x.float()
    normal = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if weight is None:
        return normal.to(x.dtype)
    if round_first:
        factor = weight + offset if offset else weight
        return (factor * normal.to(x.dtype)).to(x.dtype)
    factor = weight.float() + offset if offset else weight.float()
    return (normal * factor).to(x.dtype)


@reference("layer_norm")
def layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    eps: float,
    round_first: bool = False,
) -> Tensor:
    if not round_first and all(p is None or p.dtype == x.dtype for p in (weight, bias)):
        return F.layer_norm(x, x.shape[-1:], weight, bias, eps)
    wide = x.float()
    centred = wide - wide.mean(-1, keepdim=True)
    result = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    if round_first:
        result = result.to(x.dtype)
    if weight is not None:
        result = result * (weight if round_first else weight.float())
    if bias is not None:
        result = result + (bias if round_first else bias.float())
    return result.to(x.dtype)


@reference("rotary_table")
def rotary_table(
    positions: Tensor, inv_freq: Tensor, *, layout: str, dtype: str, scaling: float = 1.0
) -> tuple[Tensor, Tensor]:
    """[..., T] and [D/2] give cos and sin [..., T, D], or [..., T, D/2] for layout half_width."""
    angles = positions.float().unsqueeze(-1) * inv_freq.float()
    if layout == "half":
        angles = torch.cat((angles, angles), -1)
    elif layout == "repeat":
        angles = angles.repeat_interleave(2, -1)
    to = TORCH_DTYPES[dtype]
    return (angles.cos() * scaling).to(to), (angles.sin() * scaling).to(to)


@reference("rope")
def rope(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    style: str,
    head_axis: int,
    half_width: bool = False,
    f32: bool = False,
) -> Tensor:
    """Rotate the first columns of [..., T, H, D] (head_axis -2) or [..., H, T, D] (-3); the others pass."""
    if half_width:
        cos, sin = (
            torch.cat((t, t), -1) if style == "half" else t.repeat_interleave(2, -1) for t in (cos, sin)
        )
    cos, sin = cos.unsqueeze(head_axis), sin.unsqueeze(head_axis)
    width = cos.shape[-1]
    turned, rest = x[..., :width], x[..., width:]
    if f32:
        turned, cos, sin = turned.float(), cos.float(), sin.float()
    if style == "half":
        swapped = torch.cat((-turned[..., width // 2 :], turned[..., : width // 2]), -1)
    else:
        swapped = torch.stack((-turned[..., 1::2], turned[..., 0::2]), -1).flatten(-2)
    result = (turned * cos + swapped * sin).to(x.dtype)
    return torch.cat((result, rest), -1) if rest.shape[-1] else result


def masked_attention(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float, softcap: float, sinks: Tensor | None
) -> Tensor:
    """q [T, H, D], k and v [C, Hk, D], visible [T, C]; inside in f32, rounded once. A row that sees nothing is 0."""
    heads, shared = q.shape[1], q.shape[1] // k.shape[1]
    wide_k, wide_v = (t.float().repeat_interleave(shared, 1).transpose(0, 1) for t in (k, v))
    scores = q.float().transpose(0, 1) @ wide_k.transpose(1, 2) * scale  # [H, T, C]
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~visible, float("-inf"))
    if sinks is not None:
        column = sinks.float().view(heads, 1, 1).expand(heads, q.shape[0], 1)
        weights = torch.cat((scores, column), -1).softmax(-1)[..., :-1]
    else:
        # A row of -inf alone gives NaN; no other NaN is silenced.
        weights = scores.softmax(-1).masked_fill(~visible.any(-1, keepdim=True), 0.0)
    return (weights @ wide_v).transpose(0, 1).to(q.dtype)


@reference("attention")
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None = None,
    *,
    scale: float,
    causal: bool,
    window: int = 0,
    softcap: float = 0.0,
) -> Tensor:
    """Tokens of one sequence. With fewer queries than keys the queries are the last ones."""
    keys = torch.arange(k.shape[0])
    queries = torch.arange(k.shape[0] - q.shape[0], k.shape[0]).unsqueeze(1)
    visible = keys <= queries if causal else torch.ones(q.shape[0], k.shape[0], dtype=torch.bool)
    if window:
        visible = visible & (keys > queries - window)
        if not causal:
            visible = visible & (keys < queries + window)
    return masked_attention(q, k, v, visible, scale, softcap, sinks)


def activate(x: Tensor, act: str) -> Tensor:
    """One of ``ir.ops.model.ACTIVATIONS`` but gpt_oss, which takes gate and up together."""
    return ACTIVATIONS[act](x)


def gate_times_up(
    gate: Tensor, up: Tensor, act: str, limit: float | None = None, alpha: float | None = None
) -> Tensor:
    """act(gate) * up; every step rounded to the operands' dtype."""
    if act == "gpt_oss":
        top = GPT_OSS_LIMIT if limit is None else limit
        gate, up = gate.clamp(max=top), up.clamp(-top, top)
        slope = GPT_OSS_ALPHA if alpha is None else alpha
        return (up + 1) * (gate * torch.sigmoid(gate * slope))
    return activate(gate, act) * up


@reference("gated_act")
def gated_act(gate: Tensor, up: Tensor, *, act: str) -> Tensor:
    return gate_times_up(gate, up, act)


@reference("softcap")
def softcap(x: Tensor, *, cap: float) -> Tensor:
    return torch.tanh(x / cap) * cap


@reference("experts")
def experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    *,
    act: str,
    interleaved: bool = False,
    limit: float | None = None,
    alpha: float | None = None,
) -> Tensor:
    """x [T, K], ids and weights [T, top], gate_up [E, 2F, K], down [E, K, F]; experts are added in ascending order."""
    total = torch.zeros_like(x)
    for expert in sorted(set(ids.flatten().tolist())):
        token, place = torch.where(ids == expert)
        both = linear(x[token], gate_up[expert], None if gate_up_bias is None else gate_up_bias[expert])
        gate, up = (both[..., ::2], both[..., 1::2]) if interleaved else both.chunk(2, -1)
        hidden = gate_times_up(gate, up, act, limit, alpha)
        out = linear(hidden, down[expert], None if down_bias is None else down_bias[expert])
        total.index_add_(0, token, (out * weights[token, place, None]).to(x.dtype))
    return total


@reference("topk")
def topk(x: Tensor, *, k: int) -> tuple[Tensor, Tensor]:
    values, indices = torch.topk(x, k, -1)
    return values, indices
