"""Operands and decays of state-space models: S4D, S5, LRU, Mamba and Mamba-3.

Gates of other recurrences are in `gates`.
"""
