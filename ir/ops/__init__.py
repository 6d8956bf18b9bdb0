"""Op definitions, by what they serve: tensors, models, serving, fused forms."""
