"""Adapters to kernels of other packages, for comparisons. They run only when requested by name."""
