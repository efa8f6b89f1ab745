"""Kernels of the products of few rows: of one or two rows, of more, and through experts."""
