"""Kernels of the delta rule with momentum: the scans, the operands of a chunk, and shared loads and stores."""
