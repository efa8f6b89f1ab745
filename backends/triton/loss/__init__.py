"""The cross entropy of one block of logits. `backends/ops/cross_entropy.py` forms the blocks."""
