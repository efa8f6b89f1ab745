"""Log-linear attention: a state for each level of a Fenwick tree over the past."""
