"""Filling in the middle: how models that can do it mark the text before and the text after."""

from compilerllm.errors import InvalidParameter
from compilerllm.text.tokenizer import Tokenizer

# (before the prefix, before the suffix, before what is to be written); all must be tokens of the model.
MARKS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen coder, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite code
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    (
        "<\uff5cfim\u2581begin\uff5c>",
        "<\uff5cfim\u2581hole\uff5c>",
        "<\uff5cfim\u2581end\uff5c>",
    ),  # DeepSeek coder
)


def infill_prompt(tokenizer: Tokenizer, prefix: str, suffix: str) -> str:
    """The prompt after which the model writes what stands between the two. Raises ``InvalidParameter`` if it cannot."""
    for marks in MARKS:
        if all(tokenizer.has_token(mark) for mark in marks):
            before, after, middle = marks
            return f"{before}{prefix}{after}{suffix}{middle}"
    raise InvalidParameter(
        "suffix: this model has no tokens for filling in the middle; send the prompt alone", "suffix"
    )
