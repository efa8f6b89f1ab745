"""Benchmarks: what is timed, how it is timed, and on which machine."""
