"""A plan of a process's memory, item by item, and the ledger that holds allocations to it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from compilerllm.kernels.errors import KernelError

MEBIBYTE = 1 << 20
# exact: the very bytes that will be asked for. measured: of this machine, now. estimated: from figures of another run.
Basis = Literal["exact", "measured", "estimated"]


class DoesNotFit(KernelError):
    """A plan that is larger than the memory there is; the message has every item."""


class AllocationBeyondPlan(KernelError):
    """An item asks for more than was planned for it: a mistake of ours, not of the user's."""


@dataclass(frozen=True)
class Item:
    """One part of a plan. ``flags`` make it smaller; ``later``: taken by the first request that needs it, not at the start;
    ``before``: taken by the process before the first allocation of ours."""

    name: str
    nbytes: int
    basis: Basis = "exact"
    flags: tuple[str, ...] = ()
    note: str = ""
    later: bool = False
    before: bool = False


@dataclass(frozen=True)
class MemoryPlan:
    """Everything but the KV blocks, in the order in which it is taken."""

    items: tuple[Item, ...]

    def __getitem__(self, name: str) -> int:
        """Bytes of an item; 0 for one that the plan does not have."""
        return sum(i.nbytes for i in self.items if i.name == name)

    @property
    def total(self) -> int:
        """Bytes at the end of the start."""
        return sum(i.nbytes for i in self.items if not i.later)

    @property
    def ceiling(self) -> int:
        """Bytes with what comes later: no request takes more."""
        return sum(i.nbytes for i in self.items)

    @property
    def to_come(self) -> int:
        """Bytes that are not taken before the first allocation."""
        return sum(i.nbytes for i in self.items if not i.before)

    @property
    def largest(self) -> Item:
        """The largest item."""
        return max(self.items, key=lambda i: i.nbytes)

    def by_name(self) -> dict[str, int]:
        """Bytes by item."""
        return {i.name: i.nbytes for i in self.items}

    def text(self) -> str:
        """For a log or a card: MiB by item, without what the process takes anyway and what comes later."""
        parts = (f"{i.name} {i.nbytes / MEBIBYTE:,.0f}" for i in self.items if not (i.later or i.before))
        return ", ".join(parts) + " MiB"

    def check(self, limit: int, what: str, *, taken: bool = False) -> None:
        """Raise ``DoesNotFit`` where the plan is larger than ``limit``, which is ``what``.

        taken: the part that is there before the first allocation is not in the limit.
        """
        need = self.to_come if taken else self.ceiling
        if need <= limit:
            return
        items = [i for i in self.items if not (taken and i.before)]
        listed = ", ".join(f"{i.name} {i.nbytes / MEBIBYTE:,.1f}" for i in items)
        flags = list(dict.fromkeys(f for i in sorted(items, key=lambda i: -i.nbytes)[:3] for f in i.flags))
        raise DoesNotFit(
            f"the plan takes {need / MEBIBYTE:,.1f} MiB before any KV block, {(need - limit) / MEBIBYTE:,.1f} MiB more than "
            f"{what} ({limit / MEBIBYTE:,.1f} MiB): {listed} MiB. `compilerllm plan` computes what fits"
            + (f"; smaller by {', '.join(flags)}." if flags else ".")
        )


class Ledger:
    """What has been allocated, by item; from ``hold`` on, no item may grow beyond its plan."""

    def __init__(self) -> None:
        self.taken: dict[str, int] = {}
        self._limits: Mapping[str, int] | None = None

    def hold(self, limits: Mapping[str, int]) -> None:
        """Hold the items to these bytes from now on. An item that is not among them has no limit."""
        self._limits = dict(limits)

    def charge(self, item: str, nbytes: int) -> None:
        """Note an allocation before it is made. Raises ``AllocationBeyondPlan``."""
        after = self.taken.get(item, 0) + nbytes
        limit = (self._limits or {}).get(item)
        if limit is not None and after > limit:
            raise AllocationBeyondPlan(
                f"{item}: {nbytes:,} bytes more would make {after:,}, but the memory plan has {limit:,}. "
                "Please report this with what `compilerllm plan` prints for the model."
            )
        self.taken[item] = after
