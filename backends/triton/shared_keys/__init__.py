"""Additive updates of many value heads of width 1 that share a key head: the slots of GSA, ABC and Raven."""
