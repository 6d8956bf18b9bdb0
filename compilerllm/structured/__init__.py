"""Outputs that must have a form: JSON schemas, regular expressions, choices and grammars, as masks over the next token."""
