"""Elementwise recurrences: no erase term and values of width 1 or 2; the kernels are in kernels/element."""
