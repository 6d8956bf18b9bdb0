"""The live server over the fake engine, here too."""

from tests.server.conftest import live, shared, start, tokenizer

__all__ = ["live", "shared", "start", "tokenizer"]
