"""Errors a user can cause. Each says what is wrong, where, and what to do; none is shown with a traceback."""

OUT_OF_MEMORY = (
    "Memory ran out. Free some, lower --max-num-batched-tokens, --max-num-seqs or --kv-cache-bytes, or use a "
    "quantised checkpoint."
)


class CompilerLLMError(Exception):
    """Base of every error that a user's input, file, flag or environment can cause."""


class InvalidParameter(CompilerLLMError):
    """A request or flag has a value outside what it may be. ``param`` names the field (None if several)."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ContextLengthExceeded(InvalidParameter):
    """A prompt, with the tokens asked for, does not fit the model's context."""

    def __init__(self, prompt_tokens: int, max_tokens: int, limit: int, *, at_least: bool = False) -> None:
        """``at_least``: the prompt was not counted to its end."""
        super().__init__(
            f"This model's maximum context length is {limit} tokens, but the request has "
            f"{'at least ' if at_least else ''}{prompt_tokens} prompt "
            f"tokens and asks for {max_tokens} more. Shorten the prompt, lower max_tokens, or serve with a larger "
            "--max-model-len.",
            "messages",
        )
        self.prompt_tokens, self.max_tokens, self.limit = prompt_tokens, max_tokens, limit


class EngineDead(CompilerLLMError):
    """The engine process ended while requests were open. They are answered with this; the engine restarts."""


class GenerationFailed(CompilerLLMError):
    """The engine ended a request with an error; the message says which."""


class QueueFull(CompilerLLMError):
    """More requests wait than ``--max-num-waiting`` allows."""


class EngineStartFailed(CompilerLLMError):
    """The engine process could not start; the message says why."""


class KVCacheTooLarge(CompilerLLMError):
    """The KV cache asked for is larger than the memory that there is."""


class KVCacheTooSmall(CompilerLLMError):
    """The KV cache cannot hold one sequence of the context length asked for."""
