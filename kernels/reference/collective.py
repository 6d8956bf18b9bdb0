"""All-reduce between interpreters that run as threads of one process, one a rank."""

import threading
from typing import Protocol

from torch import Tensor


class Collective(Protocol):
    """What an interpreter of one rank asks of the others."""

    def all_reduce(self, x: Tensor, axis: str) -> Tensor:
        """Sum over the ranks of a mesh axis; every rank must call it, in the same order."""
        ...


class ThreadCollective:
    """A mesh of one axis whose ranks are threads. Sums go in rank order, so every rank gets the same bits."""

    def __init__(self, size: int, timeout: float = 60.0) -> None:
        self.size = size
        self._barrier = threading.Barrier(size, timeout=timeout)
        self._parts: list[Tensor | None] = [None] * size

    def rank(self, index: int) -> Collective:
        """The view of one rank."""
        return _Rank(self, index)

    def sum(self, index: int, x: Tensor) -> Tensor:
        self._parts[index] = x
        self._barrier.wait()
        first, *others = (part for part in self._parts if part is not None)
        total = first.clone()
        for part in others:
            total = total + part
        self._barrier.wait()  # nobody may overwrite its part before all have read it
        return total


class _Rank:
    def __init__(self, group: ThreadCollective, index: int) -> None:
        self.group, self.index = group, index

    def all_reduce(self, x: Tensor, axis: str) -> Tensor:
        return self.group.sum(self.index, x)
