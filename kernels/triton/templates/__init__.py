"""Triton kernels. Also importable as ``kernels.triton.interpreted``: the same files, run by Triton's interpreter."""
