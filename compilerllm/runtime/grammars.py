"""The grammar compiler of an engine: made from what the loader tells of the model's tokenizer."""

from pathlib import Path

from compilerllm.config import StructuredConfig
from compilerllm.runtime.constraints import GrammarCompiler
from compilerllm.runtime.messages import ModelFacts


def make_grammars(facts: ModelFacts, vocab_size: int, config: StructuredConfig) -> GrammarCompiler | None:
    """None for a model without a tokenizer. No grammar library is loaded before the first request that needs one."""
    if not facts.tokenizer:
        return None
    from compilerllm.structured.compiler import Grammars

    return Grammars(
        Path(facts.tokenizer), vocab_size, config.structured_outputs_backend, config.grammar_cache_bytes
    )
