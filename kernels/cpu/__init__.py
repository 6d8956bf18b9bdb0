"""Kernels for CPUs: C++ templates in ``csrc/`` and the generator of the code that calls them."""
