"""Exact context parallelism: sequences that are split over ranks, and what the ranks exchange for each operator."""
