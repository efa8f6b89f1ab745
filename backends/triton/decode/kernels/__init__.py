"""Decode kernels: one token per sequence, with the state updated in place."""
