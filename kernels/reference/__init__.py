"""Every op in plain ATen: slow, obvious, and what all other kernels are compared with."""
