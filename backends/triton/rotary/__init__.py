"""Kernels that rotate q and k by angles that accumulate over the tokens."""
