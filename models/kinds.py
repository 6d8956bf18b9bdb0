"""The decoder layers of a model sorted by kind, and a model cut down to one layer of each kind.

A kind is the module classes, parameter shapes and Python scalars of a layer, less its index, with whatever the
configuration lists per layer.
"""

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from compilerllm.models.errors import CaptureError

_INDEX_NAMES = ("layer_idx", "layer_id", "layer_index", "layer_number")
_SCALARS = (bool, int, float, str, type(None), torch.dtype)


@dataclass(frozen=True)
class LayerPlan:
    """Where the layers are and which of them represents each kind.

    path: module path of the layer list, ``model.layers``. kind_of[i]: the kind of layer i. representatives[k]: the
    first layer of kind k.
    """

    path: str
    kind_of: tuple[int, ...]
    representatives: tuple[int, ...]


def find_layers(model: nn.Module, count: int) -> tuple[str, nn.ModuleList]:
    """The decoder's layer list. Raises ``CaptureError`` when there is no list of ``count`` modules."""
    lists = [(p, m) for p, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m) == count]
    if not lists:
        raise CaptureError(
            f"{type(model).__name__} has no list of {count} decoder layers (config.num_hidden_layers); "
            "only decoders made of such a list can be captured"
        )
    return min(lists, key=lambda item: item[0].count("."))


def _scalar(value: Any) -> bool:
    return isinstance(value, _SCALARS) or (isinstance(value, tuple | list) and all(_scalar(v) for v in value))


def signature(
    layer: nn.Module, per_layer: tuple[Any, ...], stored: Mapping[str, str], prefix: str
) -> tuple[Any, ...]:
    """What two layers must have in common to share a function. ``stored``: packed dtypes by global parameter name."""
    parts: list[Any] = [per_layer]
    for path, module in layer.named_modules():
        scalars = tuple(
            (k, str(v))
            for k, v in sorted(vars(module).items())
            if k not in _INDEX_NAMES and k[0] != "_" and _scalar(v)
        )
        shapes = tuple(
            (
                name,
                tuple(p.shape),
                str(p.dtype),
                stored.get(f"{prefix}.{path}.{name}" if path else f"{prefix}.{name}"),
            )
            for group in (module.named_parameters, module.named_buffers)
            for name, p in group(recurse=False)
        )
        parts.append((path, type(module), scalars, shapes))
    return tuple(parts)


def _per_layer_lists(config: Any, count: int) -> dict[str, list[Any]]:
    return {
        k: list(v) for k, v in vars(config).items()
        if isinstance(v, list | tuple) and len(v) == count and k not in ("architectures",)
    }  # fmt: skip


def plan_layers(model: nn.Module, config: Any, stored: Mapping[str, str]) -> LayerPlan:
    """Sort the layers of a model (on any device, meta too) by kind."""
    count = int(config.num_hidden_layers)
    path, layers = find_layers(model, count)
    lists = _per_layer_lists(config, count)
    kinds: dict[tuple[Any, ...], int] = {}
    kind_of, representatives = [], []
    for index, layer in enumerate(layers):
        listed = tuple((k, str(v[index])) for k, v in sorted(lists.items()))
        key = signature(layer, listed, stored, f"{path}.{index}")
        if key not in kinds:
            kinds[key] = len(kinds)
            representatives.append(index)
        kind_of.append(kinds[key])
    return LayerPlan(path, tuple(kind_of), tuple(representatives))


@contextmanager
def one_of_each(model: nn.Module, config: Any, plan: LayerPlan) -> Iterator[nn.ModuleList]:
    """The model with only the representatives in its layer list; restored afterwards, layer indices apart."""
    count = int(config.num_hidden_layers)
    parent = model.get_submodule(plan.path.rpartition(".")[0])
    name = plan.path.rpartition(".")[2]
    full: nn.ModuleList = getattr(parent, name)
    lists = _per_layer_lists(config, count)
    chosen = nn.ModuleList([full[i] for i in plan.representatives])
    for position, layer in enumerate(chosen):
        for module in layer.modules():
            for key in _INDEX_NAMES:
                if isinstance(vars(module).get(key), int):
                    setattr(module, key, position)
    saved = {k: copy.copy(vars(config)[k]) for k in lists}
    try:
        setattr(parent, name, chosen)
        config.num_hidden_layers = len(chosen)
        for key, values in lists.items():
            setattr(config, key, [values[i] for i in plan.representatives])
        yield chosen
    finally:
        setattr(parent, name, full)
        config.num_hidden_layers = count
        for key, values in saved.items():
            setattr(config, key, values)


def restore_buffers(model: nn.Module) -> set[str]:
    """Give the buffers no checkpoint stores (rotary frequencies, scales) their values on a model built on meta.

    Uses the model's own initialisation. Returns the names of those whose value could not be found out.
    """
    unknown: set[str] = set()
    owner: Any = model
    for path, module in model.named_modules():
        if hasattr(module, "_init_weights"):
            owner = module
        names = [n for n in module._non_persistent_buffers_set if module._buffers.get(n) is not None]
        if not names:
            continue
        for name in names:
            old = module._buffers[name]
            assert old is not None
            blank = (
                float("nan") if old.is_floating_point() else (False if old.dtype == torch.bool else -(2**7))
            )
            module._buffers[name] = torch.full(old.shape, blank, dtype=old.dtype)
        with torch.no_grad():
            owner._init_weights(module)
        for name in names:
            value = module._buffers[name]
            assert value is not None
            if value.is_floating_point() and bool(value.isnan().any()):
                unknown.add(f"{path}.{name}" if path else name)
    return unknown
