"""Triton kernels, one phase per file; forward.py and backward.py launch them.

Sizes that change from call to call (tokens, sequences) are not specialised, so a new length compiles nothing.
"""
