"""Rotary embeddings: modules that make tables and functions that apply them, replaced by operators after a probe."""

import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from compilerllm.models import formulas
from compilerllm.models.opset import ops
from compilerllm.models.probe import PROBE_DTYPES, attempt, equal, random_sample


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
    for dtype in PROBE_DTYPES:
        want = attempt(lambda dtype=dtype: module(torch.zeros(1, 6, 8, dtype=dtype), positions, *extra))  # type: ignore[misc]
        if not (isinstance(want, tuple) and len(want) == 2):
            return None
        forms = [
            (layout, f32) for layout, f32 in forms
            if all(map(equal, formulas.rotary_table(
                positions, frequencies, layout, torch.float32 if f32 else dtype, scaling), want))
        ]  # fmt: skip
    return _Table(buffer, forms[0][0], scaling, forms[0][1]) if forms else None


def swap_tables(model: nn.Module, left: list[str]) -> tuple[int, set[tuple[str, bool]]]:
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


@dataclass(frozen=True)
class Rope:
    """narrow: a full-width table of which only the first half is read, as glm does. partial: also right for tables
    narrower than the head."""

    style: str
    half_width: bool
    f32: bool
    narrow: bool = False
    partial: bool = False

    def tables(self, *tables: Tensor) -> list[Tensor]:
        return [t[..., : t.shape[-1] // 2] for t in tables] if self.narrow else list(tables)

    def run(self, x: Tensor, cos: Tensor, sin: Tensor, head_axis: int) -> Tensor:
        cos, sin = self.tables(cos, sin)
        return formulas.rope(x, cos, sin, self.style, head_axis, self.half_width, self.f32)


def _candidates(layout: str, wide: bool) -> Iterator[Rope]:
    """Forms that fit tables of a layout; float32 tables widen the products by themselves."""
    half_width = layout == "half_width"
    for f32 in (True,) if wide else (False, True):
        for style in ("half", "interleaved"):
            yield Rope(style, half_width, f32)
        if layout == "half":
            yield Rope("interleaved", True, f32, narrow=True)


def _agrees(function: Callable[..., Any], form: Rope, layout: str, wide: bool, width: int) -> bool:
    """Whether ``form`` is what ``function`` computes, in both dtypes and both orders of heads and tokens."""
    samples = random_sample(1, 4, 5, 16, seed=3), random_sample(1, 2, 5, 16, seed=4)
    frequencies = 1.0 / 100.0 ** (torch.arange(0, width, 2).float() / width)
    tables = formulas.rotary_table(torch.arange(5)[None], frequencies, layout, torch.float32, 1.0)
    for dtype, (axis, head_axis) in itertools.product(PROBE_DTYPES, ((1, -3), (2, -2))):
        given = [t.to(dtype) if axis == 1 else t.to(dtype).transpose(1, 2).contiguous() for t in samples]
        cos, sin = (t.to(torch.float32 if wide else dtype) for t in tables)
        want = attempt(lambda g=given, c=cos, s=sin, a=axis: function(*g, c, s, unsqueeze_dim=a))  # type: ignore[misc]
        if not (isinstance(want, tuple) and len(want) == 2):
            return False
        if not all(equal(form.run(x, cos, sin, head_axis), w) for x, w in zip(given, want, strict=True)):
            return False
    return True


def probe_rope(function: Callable[..., Any], layouts: set[tuple[str, bool]]) -> Rope | None:
    """What ``function(q, k, cos, sin)`` computes with tables of the layouts (and: always float32) the model makes."""
    for layout, wide in sorted(layouts):
        for form in _candidates(layout, wide):
            if _agrees(function, form, layout, wide, 16):
                return replace(form, partial=_agrees(function, form, layout, wide, 8))
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


def _rope_function(original: Callable[..., Any], form: Rope, uses: list[int]) -> Callable[..., Any]:
    def apply(
        q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, unsqueeze_dim: int = 1, **kwargs: Any
    ) -> Any:
        width = cos.shape[-1] * (2 if form.half_width and not form.narrow else 1)
        plain = not args and not kwargs and q.dim() == k.dim() == 4 and cos.dim() == sin.dim() == 3
        if not plain or unsqueeze_dim not in (1, 2) or not (width == q.shape[-1] or form.partial):
            return original(q, k, cos, sin, *args, unsqueeze_dim=unsqueeze_dim, **kwargs)
        head_axis = -3 if unsqueeze_dim == 1 else -2
        uses.append(1)
        tables = form.tables(cos, sin)
        return tuple(ops.rope(t, *tables, form.style, head_axis, form.half_width, form.f32) for t in (q, k))

    return apply


@contextmanager
def swapped_rotary(model: nn.Module, layouts: set[tuple[str, bool]], left: list[str]) -> Iterator[list[int]]:
    """Replace the rotary functions of a model's files until the end. Gives a list that grows by one for each call traced."""
    uses: list[int] = []
    functions = _rotary_functions(model) if layouts else {}
    try:
        for (module, name), function in functions.items():
            form = probe_rope(function, layouts)
            if form is not None:
                setattr(sys.modules[module], name, _rope_function(function, form, uses))
            else:
                left.append(f"{module}.{name} equals none of our rotary formulas")
        yield uses
    finally:
        for (module, name), function in functions.items():
            setattr(sys.modules[module], name, function)
