"""Probe-verified swaps: a module's own norm or rotary code is replaced by one operator only after it has been run on
samples and found equal to one of our formulas: bit for bit in bfloat16, closely in float32.

What no formula equals stays as it is and reaches the IR as the ATen operators it is made of.
"""

import copy
import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from compilerllm.models import formulas
from compilerllm.models.interfaces import probe_experts
from compilerllm.models.opset import ops

_PROBE_DTYPES = (torch.bfloat16, torch.float32)


@dataclass(frozen=True)
class Swaps:
    """How many modules and functions were replaced, and which were not, with the reason."""

    norms: int
    rotary: int
    tables: int
    experts: int
    left: tuple[str, ...]


def _random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _equal(got: Tensor, want: Tensor) -> bool:
    if got.shape != want.shape or got.dtype != want.dtype:
        return False
    if want.dtype == torch.bfloat16:
        return torch.equal(got, want)
    return torch.allclose(got, want, rtol=1e-5, atol=1e-6)


def _attempt(function: Callable[[], Any]) -> Any:
    """A probe's result, or None where the model's code refuses our sample: then nothing is swapped."""
    try:
        return function()
    except (RuntimeError, TypeError, ValueError, AttributeError, IndexError, KeyError):
        return None


# Norms


@dataclass(frozen=True)
class _Norm:
    kind: str
    eps: float
    offset: float
    round_first: bool

    def run(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        if self.kind == "rms":
            return formulas.rms_norm(x, weight, self.eps, self.offset, self.round_first)
        return formulas.layer_norm(x, weight, bias, self.eps, self.round_first)

    def node(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        result: Tensor
        if self.kind == "rms":
            result = ops.rms_norm(x, weight, self.eps, self.offset, self.round_first)
        else:
            result = ops.layer_norm(x, weight, bias, self.eps, self.round_first)
        return result


def _is_norm(module: nn.Module) -> bool:
    return "Norm" in type(module).__name__ and not isinstance(module, nn.LayerNorm)


def _eps_candidates(module: nn.Module) -> list[float]:
    return [v for k, v in vars(module).items() if "eps" in k and isinstance(v, float)] or [1e-6, 1e-5]


def probe_norm(module: nn.Module) -> _Norm | None:
    """The formula ``module`` computes, found by running a copy with random weights of the same shape."""
    weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
    names = {name for name, p in module.named_parameters(recurse=False) if p is not None}
    if not names <= {"weight", "bias"} or any(True for _ in module.children()):
        return None
    if weight is not None and weight.dim() != 1:
        return None
    width = 64 if weight is None else int(weight.shape[0])
    rows = _random(5, width) * torch.tensor([[1.0], [30.0], [1e-2], [1e-3], [0.3]])
    candidates = [
        _Norm(kind, eps, offset, round_first)
        for eps in _eps_candidates(module)
        for kind, offset in (("rms", 0.0), ("rms", 1.0), ("layer", 0.0))
        for round_first in (True, False)
        if not (kind == "rms" and bias is not None) and not (weight is None and (offset or not round_first))
    ]
    for dtype in _PROBE_DTYPES:
        w = None if weight is None else _random(width, seed=1).to(dtype)
        b = None if bias is None else _random(width, seed=2).to(dtype)
        twin = copy.copy(module)
        twin.__dict__["_parameters"] = {"weight": w, "bias": b} if bias is not None else {"weight": w}
        given = rows.to(dtype)
        want = _attempt(lambda twin=twin, given=given: twin(given))  # type: ignore[misc]
        if not isinstance(want, Tensor):
            return None
        candidates = [c for c in candidates if _equal(c.run(given, w, b), want)]
    return candidates[0] if candidates else None


def _swap_norms(model: nn.Module, left: list[str]) -> int:
    known: dict[tuple[Any, ...], _Norm | None] = {}
    count = 0
    for path, module in model.named_modules():
        if not _is_norm(module):
            continue
        shape = tuple((n, tuple(p.shape)) for n, p in module.named_parameters(recurse=False))
        key = (type(module), shape, tuple(_eps_candidates(module)))
        if key not in known:
            known[key] = probe_norm(module)
        form = known[key]
        if form is None:
            left.append(f"{path}: {type(module).__name__} equals none of our norm formulas")
            continue
        module.forward = _norm_forward(module, form)
        count += 1
    return count


def _norm_forward(module: nn.Module, form: _Norm) -> Callable[..., Tensor]:
    original = module.forward

    def forward(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if any(a is not None for a in (*args, *kwargs.values())):
            result: Tensor = original(x, *args, **kwargs)
            return result
        return form.node(x, getattr(module, "weight", None), getattr(module, "bias", None))

    return forward


# Rotary tables


@dataclass(frozen=True)
class _Table:
    buffer: str
    layout: str
    scaling: float
    f32: bool  # stays in float32 whatever the hidden state's dtype


def _table_variants(module: nn.Module) -> Iterator[tuple[tuple[Any, ...], str, float]]:
    """(further arguments of forward, name of the frequencies, scaling): one per layer type where the module has them."""
    for kind in getattr(module, "layer_types", None) or ():
        if hasattr(module, f"{kind}_inv_freq"):
            yield (kind,), f"{kind}_inv_freq", float(getattr(module, f"{kind}_attention_scaling", 1.0))
    if hasattr(module, "inv_freq"):
        yield (), "inv_freq", float(getattr(module, "attention_scaling", 1.0))


def probe_table(module: nn.Module, extra: tuple[Any, ...], buffer: str, scaling: float) -> _Table | None:
    """What ``module(x, positions, *extra)`` computes, or None. Its buffers must hold real numbers."""
    frequencies = getattr(module, buffer)
    if not isinstance(frequencies, Tensor) or frequencies.device.type == "meta" or frequencies.dim() != 1:
        return None
    positions = torch.tensor([[0, 1, 2, 5, 17, 30]])
    forms = [(layout, f32) for f32 in (False, True) for layout in ("half", "repeat", "half_width")]
    for dtype in _PROBE_DTYPES:
        want = _attempt(lambda dtype=dtype: module(torch.zeros(1, 6, 8, dtype=dtype), positions, *extra))  # type: ignore[misc]
        if not (isinstance(want, tuple) and len(want) == 2):
            return None
        forms = [
            (layout, f32) for layout, f32 in forms
            if all(map(_equal, formulas.rotary_table(
                positions, frequencies, layout, torch.float32 if f32 else dtype, scaling), want))
        ]  # fmt: skip
    return _Table(buffer, forms[0][0], scaling, forms[0][1]) if forms else None


def _swap_tables(model: nn.Module, left: list[str]) -> tuple[int, set[tuple[str, bool]]]:
    """How many were replaced, and the layouts (with: always float32) that rotary functions will be given."""
    count, layouts = 0, set()
    for path, module in model.named_modules():
        if "Rotary" not in type(module).__name__:
            continue
        tables = {
            extra: probe_table(module, extra, name, scale) for extra, name, scale in _table_variants(module)
        }
        if not tables or None in tables.values():
            left.append(f"{path}: {type(module).__name__} equals none of our rotary tables")
            continue
        found = {extra: table for extra, table in tables.items() if table is not None}
        module.forward = _table_forward(module, found)
        layouts |= {(table.layout, table.f32) for table in found.values()}
        count += 1
    return count, layouts


def _table_forward(module: nn.Module, tables: dict[tuple[Any, ...], _Table]) -> Callable[..., Any]:
    original = module.forward

    def forward(x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        table = tables.get((*args, *kwargs.values()))
        if table is None or position_ids.dim() != 2:
            return original(x, position_ids, *args, **kwargs)
        dtype = torch.float32 if table.f32 else x.dtype
        return ops.rotary_table(
            position_ids, getattr(module, table.buffer), table.layout, dtype, table.scaling
        )

    return forward


# Rotary application


@dataclass(frozen=True)
class _Rope:
    style: str
    half_width: bool
    f32: bool
    partial: bool  # also right for tables narrower than the head


def _probe_tables(half_width: bool, layout: str, width: int) -> tuple[Tensor, Tensor]:
    frequencies = 1.0 / 100.0 ** (torch.arange(0, width, 2).float() / width)
    layout = "half_width" if half_width else layout
    return formulas.rotary_table(torch.arange(5)[None], frequencies, layout, torch.float32, 1.0)


def probe_rope(function: Callable[..., Any], layouts: set[tuple[str, bool]]) -> _Rope | None:
    """What ``function(q, k, cos, sin)`` computes with tables of the layouts the model makes, or None."""
    q, k = _random(1, 4, 5, 16, seed=3), _random(1, 2, 5, 16, seed=4)
    for (layout, wide), style, f32 in itertools.product(
        sorted(layouts), ("half", "interleaved"), (False, True)
    ):
        if wide and not f32:
            continue  # float32 tables widen the products by themselves
        form = (style, layout == "half_width", f32)

        def same(
            width: int, layout: str = layout, wide: bool = wide, form: tuple[str, bool, bool] = form
        ) -> bool:
            style, half_width, f32 = form
            for dtype, (axis, head_axis) in itertools.product(_PROBE_DTYPES, ((1, -3), (2, -2))):
                given = [t.to(dtype) for t in (q, k)]
                if axis == 2:
                    given = [t.transpose(1, 2).contiguous() for t in given]
                table = torch.float32 if wide else dtype
                cos, sin = (t.to(table) for t in _probe_tables(half_width, layout, width))
                want = _attempt(lambda g=given, c=cos, s=sin, a=axis: function(*g, c, s, unsqueeze_dim=a))  # type: ignore[misc]
                if not (isinstance(want, tuple) and len(want) == 2):
                    return False
                got = [formulas.rope(t, cos, sin, style, head_axis, half_width, f32) for t in given]
                if not all(map(_equal, got, want)):
                    return False
            return True

        if same(16):
            return _Rope(*form, partial=same(8))
    return None


def _rotary_functions(model: nn.Module) -> dict[tuple[str, str], Callable[..., Any]]:
    """Module-level functions named like ``apply_rotary_pos_emb`` in the files the model's classes stand in."""
    found = {}
    for name in dict.fromkeys(type(m).__module__ for m in model.modules()):
        source: ModuleType | None = sys.modules.get(name)
        for key, value in vars(source).items() if source and name.startswith("transformers.models.") else ():
            if key.startswith("apply_") and "rotary" in key and callable(value):
                found[name, key] = value
    return found


def _rope_function(original: Callable[..., Any], form: _Rope, uses: list[int]) -> Callable[..., Any]:
    def apply(
        q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, unsqueeze_dim: int = 1, **kwargs: Any
    ) -> Any:
        width = cos.shape[-1] * (2 if form.half_width else 1)
        plain = not args and not kwargs and q.dim() == k.dim() == 4 and cos.dim() == sin.dim() == 3
        if not plain or unsqueeze_dim not in (1, 2) or not (width == q.shape[-1] or form.partial):
            return original(q, k, cos, sin, *args, unsqueeze_dim=unsqueeze_dim, **kwargs)
        head_axis = -3 if unsqueeze_dim == 1 else -2
        uses.append(1)
        return tuple(ops.rope(t, cos, sin, form.style, head_axis, form.half_width, form.f32) for t in (q, k))

    return apply


def _mark_experts(model: nn.Module, left: list[str]) -> int:
    count = 0
    for path, module in model.named_modules():
        if hasattr(module, "_apply_gate") and hasattr(module, "is_transposed"):
            form = probe_experts(module)
            if form is None:
                left.append(f"{path}: {type(module).__name__} gates its experts as none of our formulas does")
                continue
            module.compilerllm_gate = form
            count += 1
    return count


@contextmanager
def swapped(model: nn.Module) -> Iterator[Callable[[], Swaps]]:
    """Replace what can be replaced, modules for good (the model is a private copy), module functions until the end.

    Gives a function that says what was done; rotary applications are counted as they are traced.
    """
    left: list[str] = []
    norms = _swap_norms(model, left)
    tables, layouts = _swap_tables(model, left)
    experts = _mark_experts(model, left)
    uses: list[int] = []
    functions = _rotary_functions(model)
    try:
        for (module, name), function in functions.items():
            form = probe_rope(function, layouts) if layouts else None
            if form is not None:
                setattr(sys.modules[module], name, _rope_function(function, form, uses))
            elif layouts:
                left.append(f"{module}.{name} equals none of our rotary formulas")
        yield lambda: Swaps(norms, len(uses), tables, experts, tuple(left))
    finally:
        for (module, name), function in functions.items():
            setattr(sys.modules[module], name, function)
