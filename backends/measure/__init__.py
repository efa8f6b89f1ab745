"""Benchmarks of backends, the timing methods they use, and a report of the environment."""
