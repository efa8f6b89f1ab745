"""Kernels for a decay per key channel: what differs from the kernels for a decay per head."""
