"""Tables of a report in the making: each distinct entry once, by its place."""

from collections.abc import Hashable
from typing import Generic, TypeVar

from compilerllm.explain.report import Launch, Machine
from compilerllm.kernels.launch.gpu.program import Cost

Entry = TypeVar("Entry")


class Table(Generic[Entry]):
    """Entries in the order of first use, found again by a key."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self._places: dict[Hashable, int] = {}

    def place(self, key: Hashable, entry: Entry) -> int:
        """The place of the entry with this key; it is added where there is none."""
        place = self._places.setdefault(key, len(self.entries))
        if place == len(self.entries):
            self.entries.append(entry)
        return place

    def find(self, key: Hashable) -> int | None:
        """The place, None where the key is new."""
        return self._places.get(key)


def at_context(cost: Cost, sequences: int, query: int, context: int) -> tuple[float, float]:
    """Bytes and operations of a node in a step: a query sees, on average, the context less half the queries after it."""
    seen = context - (query - 1) / 2
    return (
        cost.nbytes + cost.context_bytes * sequences * context,
        cost.flops + cost.context_flops * seen,
    )


def make_launch(
    machine: Machine, kernel: int, node: int, pick: int, nbytes: float, flops: float, predicted: float
) -> Launch:
    """A launch with its roofline, its figures rounded to what they are good for."""
    roofline = machine.roofline_us(nbytes, flops)
    return Launch(kernel, node, pick, round(nbytes), round(flops), round(roofline, 4), round(predicted, 4))
