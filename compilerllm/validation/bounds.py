"""Loads that leave their operands: every address that an interpreted kernel loads from must lie in memory it was given."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from torch import Tensor


class LoadOutOfBounds(AssertionError):
    """A load of no tensor's memory, where no mask keeps it from happening."""


def spans(tensors: Iterable[Tensor]) -> list[tuple[int, int]]:
    """First byte and end of each tensor's memory, in order, of those that have any."""
    return sorted((t.data_ptr(), t.data_ptr() + t.numel() * t.element_size()) for t in tensors if t.numel())


@contextmanager
def loads_within(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Raise ``LoadOutOfBounds`` from kernels interpreted inside that load from anywhere else. Masked loads do not count."""
    from triton.runtime import interpreter

    from compilerllm.kernels.triton import interpreter_library

    interpreter_library.enable()
    builder: Any = interpreter.InterpreterBuilder
    known = spans(tensors)
    starts, ends = np.array([s for s, _ in known]), np.array([e for _, e in known])
    before = builder.create_masked_load

    def load(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        at, on = np.broadcast_arrays(pointers.data, mask.data)
        used = at[on.astype(bool)].astype(np.int64)
        if used.size:
            place = np.searchsorted(starts, used, side="right") - 1
            outside = (place < 0) | (used >= ends[np.maximum(place, 0)])
            if outside.any():
                raise LoadOutOfBounds(f"{int(outside.sum())} loads of one instruction leave their operand")
        return before(self, pointers, mask, *rest)

    builder.create_masked_load = load
    try:
        yield
    finally:
        builder.create_masked_load = before
