"""Thin adapters to other people's kernels, where they are installed: to compare with, chosen by name alone."""
