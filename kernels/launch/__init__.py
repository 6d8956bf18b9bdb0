"""Loading and calling built kernels. The only part of ``kernels`` that serving imports."""
