"""The kernels, one phase a file; launch.py puts them together."""
