"""Operators beside the update, such as norms, short convolutions and the loss, in plain torch.

Their Triton kernels are in `backends.triton`.
"""
