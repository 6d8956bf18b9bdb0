"""What moved between two builds or two benchmark results: kernels, passes, graphs, memory, keys, times with intervals."""
