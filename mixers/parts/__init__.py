"""Modules that mixers consist of: projections, decays, gates, norms, convolutions, caches."""
