"""Errors of the reference executor: what does not run, where it stands in the module, what to do."""

from compilerllm.ir.errors import IRError


class ReferenceFailure(IRError):
    """Base of what the interpreter refuses; names the function and the node."""


class MissingReference(ReferenceFailure):
    """An op that has no reference implementation."""


class MissingParam(ReferenceFailure):
    """A parameter the module declares and the caller did not give."""


class ParamMismatch(ReferenceFailure):
    """A parameter whose dtype or shape is not the declared one."""


class ResultMismatch(ReferenceFailure):
    """A node whose result has another dtype or shape than its type rule says."""


class UnboundDim(ReferenceFailure):
    """A dimension whose number no input tells."""


class FreedBlock(ReferenceFailure):
    """A token may see a key whose block was freed; the block table or the window is wrong."""


class NoCollective(ReferenceFailure):
    """A module for several ranks, run by one."""
