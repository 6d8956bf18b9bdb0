"""Semantic operators that stand in a captured graph for what the model spelled out in ATen.

They exist only while a model is traced under fake tensors: each has a shape rule and no kernel. ``lower`` turns each
into the IR op of the same name. ``enter`` and ``leave`` mark where a decoder layer begins and ends.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

NAMESPACE = "compilerllm"
_LIBRARY: Any = torch.library.Library(NAMESPACE, "DEF")  # type: ignore[no-untyped-call]
Rule = TypeVar("Rule", bound=Callable[..., Any])


def _define(schema: str) -> None:
    _LIBRARY.define(schema)


def _fake(name: str) -> Callable[[Rule], Rule]:
    """Register a shape rule."""

    def register(rule: Rule) -> Rule:
        torch.library.register_fake(f"{NAMESPACE}::{name}", rule, lib=_LIBRARY)
        return rule

    return register


_define("enter(Tensor x, int index) -> Tensor")
_define("leave(Tensor x, int index) -> Tensor")
_define("rms_norm(Tensor x, Tensor? weight, float eps, float offset, bool round_first) -> Tensor")
_define("layer_norm(Tensor x, Tensor? weight, Tensor? bias, float eps, bool round_first) -> Tensor")
_define(
    "rotary_table(Tensor positions, Tensor inv_freq, str layout, ScalarType dtype, float scaling) -> (Tensor, Tensor)"
)
_define(
    "rope(Tensor x, Tensor cos, Tensor sin, str style, int head_axis, bool half_width, bool f32) -> Tensor"
)
_define(
    "attention(Tensor q, Tensor k, Tensor v, Tensor? sinks, float scale, bool causal, int window, float softcap)"
    " -> Tensor"
)
_define(
    "experts(Tensor x, Tensor ids, Tensor weights, Tensor gate_up, Tensor down, Tensor? gate_up_bias,"
    " Tensor? down_bias, str act, bool interleaved, bool transposed, float limit, float alpha) -> Tensor"
)


@_fake("enter")
def _enter(x: Tensor, index: int) -> Tensor:
    return torch.empty_like(x)


@_fake("leave")
def _leave(x: Tensor, index: int) -> Tensor:
    return torch.empty_like(x)


@_fake("rms_norm")
def _rms_norm(x: Tensor, weight: Tensor | None, eps: float, offset: float, round_first: bool) -> Tensor:
    return torch.empty_like(x)


@_fake("layer_norm")
def _layer_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, round_first: bool
) -> Tensor:
    return torch.empty_like(x)


@_fake("rotary_table")
def _rotary_table(
    positions: Tensor, inv_freq: Tensor, layout: str, dtype: torch.dtype, scaling: float
) -> tuple[Tensor, Tensor]:
    width = inv_freq.shape[0] * (1 if layout == "half_width" else 2)
    shape = (*positions.shape, width)
    return positions.new_empty(shape, dtype=dtype), positions.new_empty(shape, dtype=dtype)


@_fake("rope")
def _rope(
    x: Tensor, cos: Tensor, sin: Tensor, style: str, head_axis: int, half_width: bool, f32: bool
) -> Tensor:
    return torch.empty_like(x)


@_fake("attention")
def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    scale: float,
    causal: bool,
    window: int,
    softcap: float,
) -> Tensor:
    return q.new_empty((q.shape[0], q.shape[1], v.shape[2]))


@_fake("experts")
def _experts(
    x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, gate_up_bias: Tensor | None,
    down_bias: Tensor | None, act: str, interleaved: bool, transposed: bool, limit: float, alpha: float,
) -> Tensor:  # fmt: skip
    return torch.empty_like(x)


ops = getattr(torch.ops, NAMESPACE)
