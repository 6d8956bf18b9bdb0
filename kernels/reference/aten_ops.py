"""The opaque ``aten`` op: a torch operator kept as it is, its arguments decoded as a compiled program's are."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from compilerllm.kernels.errors import ArtifactError
from compilerllm.kernels.launch.aten import decode, find_operator
from compilerllm.kernels.reference.errors import MissingReference
from compilerllm.kernels.reference.registry import reference


@reference("aten")
def aten(
    *operands: Tensor | None, target: str, args: Sequence[Any], kwargs: Sequence[Any] = ()
) -> Tensor | tuple[Tensor, ...]:
    try:
        operator = find_operator(target)
        given = [decode(a, operands) for a in args]
        named = {str(k): decode(v, operands) for k, v in kwargs}
    except ArtifactError as error:
        raise MissingReference(f"an aten node cannot run: {error}") from error
    result = operator(*given, **named)
    return tuple(result) if isinstance(result, list | tuple) else result
