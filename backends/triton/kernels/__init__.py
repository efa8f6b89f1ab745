"""The kernels, one phase a file; launch.py puts them together.

Sizes that change from call to call are not specialised: a new length, or another number of sequences, compiles nothing.
"""
