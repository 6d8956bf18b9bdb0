"""Whether a model fits into a memory, with which contexts and batches, and what would make it fit."""
