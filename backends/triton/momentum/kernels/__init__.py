"""Kernels of the delta rule with momentum, by what they compute."""
