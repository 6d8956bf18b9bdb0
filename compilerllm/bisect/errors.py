"""What a user can ask of bisect that it cannot do."""

from compilerllm.errors import CompilerLLMError, InvalidParameter


class BadPrompt(InvalidParameter):
    """A prompt that cannot be compared over: too short, too long, or of tokens that the model has not."""


class CannotCompare(CompilerLLMError):
    """A model that the reference cannot run beside the optimized one."""
