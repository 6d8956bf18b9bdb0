"""Text on either side of the engine: tokenizer, chat template, incremental detokenizer, stop strings."""
