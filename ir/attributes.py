"""Reading a node's attributes: each reader gives the kind that is asked for, or an error that names op and attribute."""

from collections.abc import Mapping
from typing import TypeGuard

import sympy

from compilerllm.ir.dims import Dim, dim
from compilerllm.ir.errors import InvalidGraph


def required(op: str, attrs: Mapping[str, object], name: str, default: object = None) -> object:
    """The attribute, or ``default``. Raises ``InvalidGraph`` where there is neither."""
    value = attrs.get(name, default)
    if value is None:
        raise InvalidGraph(f"{op} has no attribute {name!r}")
    return value


def integer(op: str, attrs: Mapping[str, object], name: str, default: int | None = None) -> int:
    """A whole number. Raises ``InvalidGraph`` for anything else, true and false included."""
    value = required(op, attrs, name, default)
    if isinstance(value, bool) or not isinstance(value, int):
        raise _wrong(op, name, "a whole number", value)
    return value


def number(op: str, attrs: Mapping[str, object], name: str, default: float | None = None) -> float:
    """A number. Raises ``InvalidGraph`` for anything else."""
    value = required(op, attrs, name, default)
    if not isinstance(value, int | float):
        raise _wrong(op, name, "a number", value)
    return float(value)


def text(op: str, attrs: Mapping[str, object], name: str, default: str | None = None) -> str:
    """Text. Raises ``InvalidGraph`` for anything else."""
    value = required(op, attrs, name, default)
    if not isinstance(value, str):
        raise _wrong(op, name, "text", value)
    return value


def items(op: str, attrs: Mapping[str, object], name: str) -> tuple[object, ...]:
    """A list of anything. Raises ``InvalidGraph`` for anything else."""
    value = required(op, attrs, name)
    if not isinstance(value, tuple):
        raise _wrong(op, name, "a list", value)
    return value


def integers(op: str, attrs: Mapping[str, object], name: str) -> tuple[int, ...]:
    """A list of whole numbers, such as a permutation. Raises ``InvalidGraph`` for anything else."""
    found = items(op, attrs, name)
    numbers = tuple(v for v in found if isinstance(v, int))
    if len(numbers) != len(found):
        raise _wrong(op, name, "a list of whole numbers", found)
    return numbers


def dimension(op: str, attrs: Mapping[str, object], name: str) -> Dim:
    """A whole number or an expression over dimensions. Raises ``InvalidGraph`` for anything else."""
    value = required(op, attrs, name)
    if not _is_dim(value):
        raise _wrong(op, name, "a dimension", value)
    return dim(value)


def dimensions(op: str, attrs: Mapping[str, object], name: str) -> tuple[Dim, ...]:
    """A list of dimensions: a shape. Raises ``InvalidGraph`` for anything else."""
    found = items(op, attrs, name)
    if wrong := [v for v in found if not _is_dim(v)]:
        raise _wrong(op, name, "a list of dimensions", wrong[0])
    return tuple(dim(v) for v in found)


def _is_dim(value: object) -> TypeGuard[Dim]:
    return isinstance(value, int | sympy.Expr) and not isinstance(value, bool)


def _wrong(op: str, name: str, wanted: str, value: object) -> InvalidGraph:
    return InvalidGraph(f"{op}: attribute {name!r} must be {wanted}, but is {value!r}")
