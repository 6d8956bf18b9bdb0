"""Tokens and text: tokenizer, chat templates, incremental detokenizer, stop strings."""
