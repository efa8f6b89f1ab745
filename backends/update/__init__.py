"""The update: its spec, operands, checks and reference, and the dispatch to a backend.

Operators beside the update are in `backends.ops`.
"""
