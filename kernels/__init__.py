"""How an op is run: specs, registry, reference, generated code, and what serving needs to launch it."""
