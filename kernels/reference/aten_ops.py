"""The opaque ``aten`` op: a torch operator kept as it is, its arguments rebuilt from the node's template.

In ``args`` and in the values of ``kwargs``, recursively: ``"%2"`` is the node's third operand, ``"none"`` is None,
``"dtype:f32"`` a dtype, ``"text:floor"`` a string; numbers and dimensions stand for themselves, a list for a list.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from compilerllm.kernels.reference.errors import MissingReference
from compilerllm.kernels.reference.registry import TORCH_DTYPES, reference


@cache
def operator(target: str) -> Any:
    """The overload called ``namespace.name.overload``. Raises ``MissingReference``."""
    namespace, _, rest = target.partition(".")
    name, _, overload = rest.partition(".")
    try:
        return getattr(getattr(getattr(torch.ops, namespace), name), overload or "default")
    except AttributeError as error:
        raise MissingReference(f"torch has no operator {target!r}; is its library imported?") from error


def decode(item: Any, operands: Sequence[Tensor | None]) -> Any:
    """One argument of the template."""
    if isinstance(item, tuple | list):
        return [decode(i, operands) for i in item]
    if not isinstance(item, str):
        return item
    if item.startswith("%"):
        return operands[int(item[1:])]
    if item == "none":
        return None
    kind, _, value = item.partition(":")
    match kind:
        case "dtype":
            return TORCH_DTYPES[value]
        case "text":
            return value
    raise MissingReference(f"an aten node has the argument {item!r}, which is no form of its template")


@reference("aten")
def aten(
    *operands: Tensor | None, target: str, args: Sequence[Any], kwargs: Sequence[Any] = ()
) -> Tensor | tuple[Tensor, ...]:
    result = operator(target)(
        *(decode(a, operands) for a in args), **{str(k): decode(v, operands) for k, v in kwargs}
    )
    return tuple(result) if isinstance(result, list | tuple) else result
