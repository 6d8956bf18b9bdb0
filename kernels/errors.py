"""Errors of kernels: what a target cannot run, what a build could not make, what an artifact lacks."""


class KernelError(Exception):
    """Base of this package's errors; each message is meant for the user."""


class UnsupportedByTarget(KernelError):
    """An op, dtype or shape that the target has no kernel for; names the node and where it came from."""


class BuildFailed(KernelError):
    """The C++ compiler is missing or refused generated code."""


class ArtifactError(KernelError):
    """An artifact that is missing a part, damaged, or made by another version or for another machine."""
