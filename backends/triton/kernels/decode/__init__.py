"""Kernels that take one token per sequence and update the state in place."""
