"""Launching, replaying and compiling kernels, and tables of measured launches. Nothing here depends on an operator."""
