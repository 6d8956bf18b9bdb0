"""How operators without a lowering are spelled with those that have one, for graphs that ``torch.compile`` captures.

Torch's own core decompositions are taken for whatever the IR has no rule for; these here are added or put in their
place. Each gives the same mathematics; sums are in torch's accumulation type (f32 for bf16).
"""

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from compilerllm.models.lower import load_rules
from compilerllm.models.opset import ops

_OWN: dict[Any, Callable[..., Any]] = {}
aten = torch.ops.aten


def _for(*operators: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        for operator in operators:
            _OWN[operator] = function
        return function

    return register


@cache
def decompositions() -> dict[Any, Callable[..., Any]]:
    """The table AOTAutograd traces with: torch's core table where we have no rule, then ours."""
    from torch._decomp import core_aten_decompositions, get_decompositions

    rules = load_rules()
    more = get_decompositions([aten._scaled_dot_product_flash_attention_for_cpu])
    table = {**core_aten_decompositions(), **more}
    return {op: how for op, how in table.items() if str(op) not in rules} | _OWN


def _axes(dim: Any, rank: int) -> list[int]:
    """The axes of a reduction, in ascending order; none given means all."""
    if dim is None or (isinstance(dim, Sequence) and not dim):
        return list(range(rank))
    return sorted(d % rank for d in ([dim] if isinstance(dim, int) else dim))


def _over_last(x: Tensor, axes: list[int], keepdim: bool, reduce: Callable[[Tensor], Tensor]) -> Tensor:
    """Move ``axes`` to the end, merge them, reduce them as one, and put their places back where asked."""
    rest = [a for a in range(x.dim()) if a not in axes]
    merged = x.permute(*rest, *axes).reshape(*(x.shape[a] for a in rest), math.prod(x.shape[a] for a in axes))
    result = reduce(merged)
    return result.reshape([1 if a in axes else x.shape[a] for a in range(x.dim())]) if keepdim else result


def _reduction(operator: Any, name: str) -> None:
    """Over several axes, or over one that is not the last: as one over the last, which rows of a kernel can do."""

    def reduce(x: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Any:
        axes = _axes(dim, x.dim())
        if x.dim() == 0 or axes == [x.dim() - 1]:
            return NotImplemented
        extra = {} if dtype is None else {"dtype": dtype}
        return _over_last(x, axes, keepdim, lambda t: getattr(t, name)(-1, **extra))

    _OWN[operator] = reduce


for _operator, _name in (
    (aten.sum.dim_IntList, "sum"), (aten.mean.dim, "mean"), (aten.amax.default, "amax"), (aten.amin.default, "amin"),
    (aten.argmax.default, "argmax"), (aten.prod.dim_int, "prod"),
):  # fmt: skip
    _reduction(_operator, _name)


@_for(aten.sum.default)
def _sum_all(x: Tensor, *, dtype: torch.dtype | None = None) -> Any:
    return NotImplemented if x.dim() == 0 else x.reshape(-1).sum(-1, dtype=dtype)


@_for(aten.mean.default)
def _mean_all(x: Tensor, *, dtype: torch.dtype | None = None) -> Any:
    return NotImplemented if x.dim() == 0 else x.reshape(-1).mean(-1, dtype=dtype)


@_for(aten.var.correction)
def _variance(
    x: Tensor, dim: Any = None, *, correction: float | None = None, keepdim: bool = False
) -> Tensor:
    axes = _axes(dim, x.dim())
    count = math.prod(x.shape[a] for a in axes)
    centred = x - x.mean(axes, keepdim=True)
    return (centred * centred).sum(axes, keepdim) / (count - (1 if correction is None else correction))


@_for(aten.var_mean.correction)
def _variance_and_mean(
    x: Tensor, dim: Any = None, *, correction: float | None = None, keepdim: bool = False
) -> tuple[Tensor, Tensor]:
    axes = _axes(dim, x.dim())
    return _variance(x, axes, correction=correction, keepdim=keepdim), x.mean(axes, keepdim)


@_for(aten.any.dim)
def _any(x: Tensor, dim: int, keepdim: bool = False) -> Tensor:
    return (x != 0).to(torch.float32).amax(dim, keepdim) > 0


@_for(aten.all.dim)
def _all(x: Tensor, dim: int, keepdim: bool = False) -> Tensor:
    return (x != 0).to(torch.float32).amin(dim, keepdim) > 0


def _along_last(x: Tensor, dim: int, function: Callable[[Tensor], Tensor]) -> Tensor:
    return function(x.movedim(dim, -1).contiguous()).movedim(-1, dim).contiguous()


@_for(aten._softmax.default)
def _softmax(x: Tensor, dim: int, half_to_float: bool) -> Any:
    if half_to_float or x.dim() == 0 or dim % x.dim() == x.dim() - 1:
        return NotImplemented
    return _along_last(x, dim, lambda t: t.softmax(-1))


@_for(aten._log_softmax.default)
def _log_softmax(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    wide = x.float() if half_to_float or x.dtype in (torch.bfloat16, torch.float16) else x
    shifted = wide - wide.amax(dim, keepdim=True)
    result = shifted - shifted.exp().sum(dim, keepdim=True).log()
    return result if half_to_float else result.to(x.dtype)


@_for(aten.native_layer_norm.default)
def _layer_norm(
    x: Tensor, shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    lead = x.dim() - len(shape)
    wide = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
    axes = list(range(lead, x.dim()))
    mean = wide.mean(axes, keepdim=True)
    centred = wide - mean
    scale = ((centred * centred).mean(axes, keepdim=True) + eps).rsqrt()
    if x.dtype in (torch.float32, torch.bfloat16):
        flat = x if len(shape) == 1 else x.reshape(*x.shape[:lead], math.prod(shape))
        flat_weight, flat_bias = (None if p is None else p.reshape(-1) for p in (weight, bias))
        result = ops.layer_norm(flat, flat_weight, flat_bias, eps, False).reshape(x.shape)
    else:
        result = centred * scale
        result = result if weight is None else result * weight
        result = (result if bias is None else result + bias).to(x.dtype)
    return result, mean, scale


@_for(aten._native_batch_norm_legit_no_training.default)
def _batch_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, variance: Tensor, momentum: float, eps: float
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    shape = [1, -1] + [1] * (x.dim() - 2)
    scale = (variance + eps).rsqrt()
    result = (x - mean.reshape(shape)) * scale.reshape(shape)
    result = result if weight is None else result * weight.reshape(shape)
    result = (result if bias is None else result + bias.reshape(shape)).to(x.dtype)
    nothing = x.new_empty(0)
    return result, nothing, nothing


@_for(aten.native_group_norm.default)
def _group_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, batch: int, channels: int, spatial: int, groups: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    wide = x.reshape(batch, groups, -1)
    wide = wide.float() if x.dtype in (torch.bfloat16, torch.float16) else wide
    mean = wide.mean(-1, keepdim=True)
    centred = wide - mean
    scale = ((centred * centred).mean(-1, keepdim=True) + eps).rsqrt()
    result = (centred * scale).reshape(x.shape)
    shape = [1, channels] + [1] * (x.dim() - 2)
    result = result if weight is None else result * weight.reshape(shape)
    result = (result if bias is None else result + bias.reshape(shape)).to(x.dtype)
    return result, mean.squeeze(-1), scale.squeeze(-1)


@_for(aten.leaky_relu.default)
def _leaky_relu(x: Tensor, slope: float = 0.01) -> Tensor:
    return torch.where(x > 0, x, x * slope)


@_for(aten.elu.default)
def _elu(x: Tensor, alpha: float = 1.0, scale: float = 1.0, input_scale: float = 1.0) -> Tensor:
    return torch.where(x > 0, x * scale, _expm1(x * input_scale) * (alpha * scale))


@_for(aten.expm1.default)
def _expm1(x: Tensor) -> Tensor:
    # Near 0 the difference would cancel; there e^x - 1 = 2 tanh(x/2) / (1 - tanh(x/2)) does not.
    half = torch.tanh(x * 0.5)
    return torch.where(x.abs() < 0.5, 2 * half / (1 - half), x.exp() - 1)


@_for(aten.ceil.default)
def _ceil(x: Tensor) -> Tensor:
    return -torch.floor(-x)


@_for(aten.trunc.default)
def _trunc(x: Tensor) -> Tensor:
    return torch.where(x < 0, -torch.floor(-x), torch.floor(x))


@_for(aten.round.default)
def _round(x: Tensor) -> Tensor:
    below = torch.floor(x)
    rest = x - below
    odd = torch.remainder(below, 2) == 1
    return torch.where((rest > 0.5) | ((rest == 0.5) & odd), below + 1, below)


@_for(aten.tan.default)
def _tan(x: Tensor) -> Tensor:
    return torch.sin(x) / torch.cos(x)


@_for(aten.sinh.default)
def _sinh(x: Tensor) -> Tensor:
    grown = _expm1(x.abs())
    half = 0.5 * (grown + grown / (grown + 1))
    return torch.where(x < 0, -half, half)


@_for(aten.cosh.default)
def _cosh(x: Tensor) -> Tensor:
    return 0.5 * (x.exp() + (-x).exp())


@_for(aten.exp2.default)
def _exp2(x: Tensor) -> Tensor:
    return (x * math.log(2)).exp()


@_for(aten.log2.default)
def _log2(x: Tensor) -> Tensor:
    return x.log() * (1 / math.log(2))


@_for(aten.log10.default)
def _log10(x: Tensor) -> Tensor:
    return x.log() * (1 / math.log(10))


@_for(aten.sign.default)
def _sign(x: Tensor) -> Tensor:
    return (x > 0).to(x.dtype) - (x < 0).to(x.dtype)


@_for(aten.isnan.default)
def _isnan(x: Tensor) -> Tensor:
    return x != x


@_for(aten.isinf.default)
def _isinf(x: Tensor) -> Tensor:
    return x.abs() == math.inf


@_for(aten.softplus.default)
def _softplus(x: Tensor, beta: float = 1.0, threshold: float = 20.0) -> Tensor:
    scaled = x * beta
    return torch.where(scaled > threshold, x, torch.log1p(scaled.exp()) / beta)


@_for(aten.mish.default)
def _mish(x: Tensor) -> Tensor:
    return x * torch.tanh(F.softplus(x))
