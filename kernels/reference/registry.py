"""The table of reference implementations: op name to one plain ATen function.

A function takes the op's operands in order (None where an optional one is left out), then its attributes as keywords,
dimensions already numbers. It returns a tensor, a tuple of tensors, or None for an op without results.
"""

from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from typing import Any, TypeVar

import torch

from compilerllm.kernels.reference.errors import MissingReference

Reference = Callable[..., Any]
_F = TypeVar("_F", bound=Reference)

# Ops that are control flow of the interpreter, not computation.
STRUCTURAL = frozenset({"call", "group"})

TORCH_DTYPES: dict[str, torch.dtype] = {
    "f64": torch.float64, "f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16, "i64": torch.int64,
    "i32": torch.int32, "i16": torch.int16, "i8": torch.int8, "u8": torch.uint8, "bool": torch.bool,
}  # fmt: skip
IR_DTYPES: dict[torch.dtype, str] = {v: k for k, v in TORCH_DTYPES.items()}

_TABLE: dict[str, Reference] = {}


def reference(name: str) -> Callable[[_F], _F]:
    """Register the function below as the meaning of op ``name``."""

    def register(function: _F) -> _F:
        if name in _TABLE:
            raise ValueError(f"op {name!r} has two reference implementations")
        _TABLE[name] = function
        return function

    return register


@cache
def _load() -> None:
    for part in ("tensor_ops", "model_ops", "serving_ops", "fused_ops", "aten_ops"):
        import_module(f"compilerllm.kernels.reference.{part}")


def lookup(name: str) -> Reference:
    """The reference of op ``name``. Raises ``MissingReference``."""
    _load()
    if name not in _TABLE:
        raise MissingReference(f"op {name!r} has no reference implementation; add one to kernels/reference")
    return _TABLE[name]


def all_references() -> Mapping[str, Reference]:
    """Every reference, by op name."""
    _load()
    return _TABLE
