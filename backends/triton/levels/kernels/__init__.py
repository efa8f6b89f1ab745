"""Kernels of log-linear attention: preparation, scan, reverse scan and gradients of chunks, and one decoded token."""
