"""Errors of the passes: a graph that cannot be served, sharded, adapted or planned as asked."""

from compilerllm.ir.errors import IRError


class PassError(IRError):
    """Base of everything a pass refuses."""


class NotServable(PassError):
    """A captured graph that would be wrong when tokens of several sequences share a step."""

    def __init__(self, function: str, what: str, hint: str) -> None:
        super().__init__(f"@{function} cannot be served: {what}. {hint}")


class CannotShard(PassError):
    """Weights or heads that do not divide over the ranks."""


class CannotAdapt(PassError):
    """Adapter targets that no linear of the model has."""


class BadPlan(PassError):
    """A memory plan in which two live values overlap; names both."""


class UnknownPass(PassError):
    """A pass name or level the pipeline does not have."""
