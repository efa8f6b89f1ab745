"""Code that leans on torch internals: custom operators, autograd helpers and CUDA graphs."""
