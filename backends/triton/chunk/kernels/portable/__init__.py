"""Kernels of the chunked update in Triton, for every GPU that the backend supports."""
