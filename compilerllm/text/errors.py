"""What can be wrong with a model's text files."""

from compilerllm.errors import CompilerLLMError, InvalidParameter


class TokenizerMissing(CompilerLLMError):
    """A model's folder has no tokenizer.json."""

    def __init__(self, folder: str) -> None:
        super().__init__(
            f"No tokenizer.json in {folder}. compilerllm reads the fast tokenizer format only: save the model's "
            "tokenizer with transformers (tokenizer.save_pretrained(folder)), or give a GGUF file that has one."
        )


class TokenizerBroken(CompilerLLMError):
    """A tokenizer file is there but cannot be read."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"Cannot read {path}: {reason}. Download or save the tokenizer again.")
        self.reason = reason


class ChatTemplateMissing(InvalidParameter):
    """A chat was asked of a model that has no chat template."""

    def __init__(self, model: str) -> None:
        super().__init__(
            f"{model} has no chat template, so messages cannot be turned into a prompt. Use /v1/completions (or "
            "LLM.generate) with a plain prompt, or serve a model tuned for chat.",
            "messages",
        )


class ChatTemplateFailed(InvalidParameter):
    """The model's chat template refused these messages, or is broken."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"The model's chat template refuses these messages: {reason}", "messages")
