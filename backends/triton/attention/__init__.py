"""Softmax attention with gates or data-dependent positions: operators and launches of flash kernels.

Attention that needs neither is torch's. Kernels are in `kernels`, one phase per file.
"""
