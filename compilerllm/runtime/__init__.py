"""The serving runtime: sequences, blocks, steps. It knows programs and tokens, nothing of graphs."""
