"""Errors on the way from a checkpoint to a Module. Each says what is wrong, where, and what to do."""

from compilerllm.ir.errors import IRError


class ModelError(IRError):
    """Base of everything a checkpoint, its configuration or its architecture can do wrong at build time."""


class CheckpointNotFound(ModelError):
    """No folder, file or hub id answers to the name the user gave."""


class InvalidCheckpoint(ModelError):
    """A checkpoint whose files are missing, damaged or contradict each other; names the file."""


class UnknownArchitecture(ModelError):
    """An architecture neither transformers nor our tables know."""


class CaptureError(ModelError):
    """A model that cannot be turned into a graph which is certain to be right."""


class UnsupportedOperator(ModelError):
    """An operator, argument or symbolic expression that has no place in the IR."""


class WeightMismatch(ModelError):
    """A weight the model needs and the checkpoint lacks, or has in another shape."""


def first_line(error: BaseException) -> str:
    """What another library's exception says, cut to one line; its class's name where it says nothing."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
