"""Elementwise recurrences: no erase term, and narrow values or a rate; the kernels are in kernels/."""
