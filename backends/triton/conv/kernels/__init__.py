"""Kernels of the short causal convolution."""
