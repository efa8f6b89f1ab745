"""Modules that mixers are assembled from: projections, decays, gates, norms, convolutions, caches."""
