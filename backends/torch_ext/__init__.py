"""Code that depends on torch internals: custom operators, autograd helpers, active modes and CUDA graphs."""
