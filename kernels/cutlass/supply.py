"""Which instances a build can have. Read where programs are emitted; what makes them is ``build``."""

from dataclasses import dataclass

from compilerllm.kernels.cutlass.instances import Instance


@dataclass(frozen=True)
class Supply:
    """All instances where ``builds``, else those called ``kept``: of a library that lies in the cache.

    reason: why none can be built; empty where that was not asked for.
    """

    builds: bool = False
    kept: frozenset[str] = frozenset()
    reason: str = ""

    def has(self, instance: Instance) -> bool:
        """Whether a build may use the instance."""
        return self.builds or instance.name in self.kept


NONE = Supply()
