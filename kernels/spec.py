"""A kernel before it is code: one frozen description that is cache key, artifact entry and tuning key alike."""

import hashlib
import json
from dataclasses import asdict, dataclass, field


@dataclass(frozen=True)
class KernelSpec:
    """What one kernel computes and how. ``reduction_key`` names the order of its sums: equal keys, equal bits."""

    op: str
    types: tuple[str, ...]  # operand types, then result types, as IR text
    attrs: tuple[tuple[str, str], ...]  # as IR text
    target: str
    template: str  # name of the template in the target's library
    config: tuple[tuple[str, str], ...] = field(default=())
    reduction_key: str = "none"

    def canonical(self) -> str:
        """Text that is equal exactly when the specs are."""
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))

    def key(self, *sources: str) -> str:
        """Content hash of the spec with the sources and tool versions it is built from."""
        digest = hashlib.sha256(self.canonical().encode())
        for source in sources:
            digest.update(b"\0" + source.encode())
        return digest.hexdigest()[:32]
