"""CUTLASS kernels: instances of C++ templates, chosen by KernelSpec, built by nvcc."""
