"""Modules that mixers are assembled from: gates, decays, norms, projections, convolutions, caches."""
