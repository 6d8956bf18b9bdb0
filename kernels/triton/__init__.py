"""CUDA kernels: Triton templates and generated groups, how an op becomes launches, and their cross-compilation."""
