"""Errors of validation: a rewrite or a kernel that is wrong, a corpus that is not there."""

from compilerllm.errors import CompilerLLMError


class RewriteInvalid(CompilerLLMError):
    """A pass changed what the graph computes. The message names pass, function, node and input."""


class KernelInvalid(CompilerLLMError):
    """A kernel does not compute what the reference does. The message names node, kernel, shape and difference."""


class CannotValidate(CompilerLLMError):
    """A rewrite that cannot be run beside the graph it replaced; the message says why."""
