"""What a pass tells: how often it matched, what almost matched and why not, and how long it took."""

from dataclasses import dataclass

from compilerllm.ir.graph import Node
from compilerllm.ir.pattern import Mismatch


@dataclass(frozen=True)
class NearMiss:
    """A node at which a pass nearly matched; ``path`` is its module in the model (empty when unknown)."""

    node: str
    reason: str
    path: str = ""

    def __str__(self) -> str:
        return f"{self.node}: {self.reason}" + (f" (in {self.path})" if self.path else "")


class PassReport:
    """Filled by one run of one pass over one function (``function`` is empty for a pass over the whole module)."""

    def __init__(self, name: str, function: str = "") -> None:
        self.name, self.function = name, function
        self.matches = 0
        self.near_misses: list[NearMiss] = []
        self.counts: dict[str, int] = {}  # what a pass counts besides, such as groups and the nodes in them
        self.seconds = 0.0

    def match(self, times: int = 1) -> None:
        """Note that a rewrite was done."""
        self.matches += times

    def miss(self, node: Node, reason: "str | Mismatch") -> None:
        """Note an almost-match. A ``Mismatch`` counts only where something beyond the root matched (depth 2 or more)."""
        if isinstance(reason, Mismatch):
            if reason.depth < 2:
                return
            reason = reason.reason
        found = NearMiss(repr(node), reason, node.origin.path)
        if found not in self.near_misses:
            self.near_misses.append(found)

    def count(self, what: str, number: int = 1) -> None:
        """Add to one of the pass's own counts."""
        self.counts[what] = self.counts.get(what, 0) + number

    def __repr__(self) -> str:
        where = f" @{self.function}" if self.function else ""
        return f"<{self.name}{where}: {self.matches} matches, {len(self.near_misses)} near misses, {self.seconds:.4f} s>"
