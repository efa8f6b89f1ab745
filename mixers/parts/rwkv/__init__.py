"""Projections and operands of RWKV-4, RWKV-6 and RWKV-7. What other mixers share is in `mixers.parts`."""
