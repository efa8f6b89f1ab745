"""Kernels of weights that are a softmax over time, with the decays that make them a recurrence."""
