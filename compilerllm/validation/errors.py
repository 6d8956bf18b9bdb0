"""Errors of validation: a rewrite that is wrong, a corpus that is not there."""

from compilerllm.errors import CompilerLLMError


class RewriteInvalid(CompilerLLMError):
    """A pass changed what the graph computes. The message names pass, function, node and input."""


class CannotValidate(CompilerLLMError):
    """A rewrite that cannot be run beside the graph it replaced; the message says why."""
