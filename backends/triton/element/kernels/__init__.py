"""Portable kernels of elementwise recurrences: no erase term and narrow values."""
