"""Launching, replaying and compiling kernels, and the tables of measured launches. Nothing here knows an operator."""
