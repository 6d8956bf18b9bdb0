"""Who decides between a node's candidates: the cost model's order, a measurement, or the machine that serves."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable


class Chooser(Protocol):
    """Picks one of several candidates for a problem: by measurement, by tuning data, or the first."""

    def choose(
        self, family: str, problem: Mapping[str, int | str], candidates: Sequence[dict[str, Any]]
    ) -> dict[str, Any]: ...


@runtime_checkable
class OpenChooser(Chooser, Protocol):
    """A chooser that may leave a choice to the machine that serves."""

    def offer(
        self, family: str, problem: Mapping[str, int | str], candidates: Sequence[dict[str, Any]]
    ) -> Sequence[dict[str, Any]]:
        """What to ship in place of what ``choose`` gives, its favourite first: one where a figure decides."""
        ...


class FirstCandidate:
    """Takes what the family's cost model puts first."""

    def choose(
        self, family: str, problem: Mapping[str, int | str], candidates: Sequence[dict[str, Any]]
    ) -> dict[str, Any]:
        return candidates[0]
