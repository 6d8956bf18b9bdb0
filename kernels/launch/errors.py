"""Errors of loading weights. Each names the file or the tensor, and says what to do."""

from compilerllm.ir.errors import IRError


class WeightError(IRError):
    """Base of everything that can go wrong between a checkpoint's files and a parameter."""


class MissingFile(WeightError):
    """A checkpoint's file that is not there."""


class DamagedFile(WeightError):
    """A file whose header cannot be read, or that is shorter than its header says."""


class MissingTensor(WeightError):
    """A tensor that no file of the checkpoint has."""


class WrongShape(WeightError):
    """A tensor, or the result of a recipe, with another shape or dtype than the model needs."""


class NotOnHub(WeightError):
    """A model that the hub does not have, does not give to this user, or cannot be asked for."""
