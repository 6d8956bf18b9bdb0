"""The table of reference implementations: op name to one plain ATen function.

A function takes the op's operands in order (None where an optional one is left out), then its attributes as keywords,
dimensions already numbers. It returns a tensor, a tuple of tensors, or None for an op without results.
"""

from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from typing import Any, TypeVar

from compilerllm.kernels.reference.errors import MissingReference

Reference = Callable[..., Any]
_F = TypeVar("_F", bound=Reference)

# Ops that are control flow of the interpreter, not computation.
STRUCTURAL = frozenset({"call", "group"})

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
