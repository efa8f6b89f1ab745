"""Recurrences and solvers beyond one update spec: token scans, log-linear states, conjugate gradients, routing.

The update is in `backends.update`.
"""
