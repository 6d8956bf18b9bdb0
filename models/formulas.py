"""The formulas our semantic ops stand for, in plain torch: what a probe compares a model's own code with.

Each rounds where the IR op says it rounds, so that a match in bfloat16, bit for bit, tells spellings apart.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F


def rms_norm(x: Tensor, weight: Tensor | None, eps: float, offset: float, round_first: bool) -> Tensor:
    """x [..., K], weight [K]. ``round_first``: to x's dtype before the weight multiplies."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if weight is None:
        return normed.to(x.dtype)
    if round_first:
        return (weight + offset if offset else weight) * normed.to(x.dtype)
    return (normed * (weight.float() + offset)).to(x.dtype)


def layer_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, round_first: bool
) -> Tensor:
    """x [..., K], weight and bias [K]."""
    wide = x.float()
    centred = wide - wide.mean(-1, keepdim=True)
    normed = centred * torch.rsqrt(centred.pow(2).mean(-1, keepdim=True) + eps)
    if round_first:
        normed = normed.to(x.dtype)
        result = normed if weight is None else weight * normed
        return result if bias is None else result + bias
    result = normed if weight is None else normed * weight.float()
    return (result if bias is None else result + bias.float()).to(x.dtype)


def rotary_table(
    positions: Tensor, inv_freq: Tensor, layout: str, dtype: torch.dtype, scaling: float
) -> tuple[Tensor, Tensor]:
    """positions [..., T], inv_freq [D/2]; gives cos and sin [..., T, D], or [..., T, D/2] for ``half_width``."""
    angles = positions[..., None].float() * inv_freq.float()
    if layout == "half":
        angles = torch.cat((angles, angles), dim=-1)
    elif layout == "repeat":
        angles = angles.repeat_interleave(2, dim=-1)
    return (angles.cos() * scaling).to(dtype), (angles.sin() * scaling).to(dtype)


def rope(
    x: Tensor, cos: Tensor, sin: Tensor, style: str, head_axis: int, half_width: bool, f32: bool
) -> Tensor:
    """x [..., H, T, D] (head_axis -3) or [..., T, H, D] (-2); cos and sin [..., T, W]. Columns past W pass."""
    cos, sin = cos.unsqueeze(head_axis), sin.unsqueeze(head_axis)
    width = cos.shape[-1] * (2 if half_width else 1)
    rotated, rest = x[..., :width], x[..., width:]
    if f32:
        rotated, cos, sin = rotated.float(), cos.float(), sin.float()
    if style == "half":
        first, second = rotated[..., : width // 2], rotated[..., width // 2 :]
        if half_width:
            result = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
        else:
            result = rotated * cos + torch.cat((-second, first), dim=-1) * sin
    else:
        first, second = rotated[..., 0::2], rotated[..., 1::2]
        if half_width:
            result = torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1).flatten(-2)
        else:
            result = rotated * cos + torch.stack((-second, first), dim=-1).flatten(-2) * sin
    return torch.cat((result.to(x.dtype), rest), dim=-1) if rest.shape[-1] else result.to(x.dtype)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
    "sigmoid": torch.sigmoid,
    "identity": lambda x: x,
}


def gate(gate_up: Tensor, act: str, interleaved: bool, limit: float, alpha: float) -> Tensor:
    """gate_up [..., 2F] to [..., F]: what happens between the two projections of an expert."""
    if interleaved:
        gate_part, up = gate_up[..., ::2], gate_up[..., 1::2]
    else:
        gate_part, up = gate_up.chunk(2, dim=-1)
    if act == "gpt_oss":
        gate_part, up = gate_part.clamp(max=limit), up.clamp(min=-limit, max=limit)
        return (up + 1) * (gate_part * torch.sigmoid(gate_part * alpha))
    return ACTIVATIONS[act](gate_part) * up
