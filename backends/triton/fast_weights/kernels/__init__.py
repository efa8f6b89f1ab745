"""Kernels that keep a model in registers and process the chunks of one sequence and head in order."""
