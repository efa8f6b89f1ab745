"""Kernels of the chunked update: one folder per architecture, one phase per file.

Functions that kernels of other families share are in `triton/device`. Sizes that change from call to call (tokens,
sequences) are not specialised, so a new length compiles nothing.
"""
