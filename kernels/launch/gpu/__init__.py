"""Running programs of launches on a GPU: what serving imports of it. No Triton, no compiler."""
