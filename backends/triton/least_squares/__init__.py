"""Kernels that solve a least-squares system for every token."""
