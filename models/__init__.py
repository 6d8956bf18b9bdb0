"""From a checkpoint to a Module: resolve, capture, lower, weights."""
