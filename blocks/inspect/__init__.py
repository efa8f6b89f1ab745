"""Values that describe what is installed, what a model costs and which backend computes it."""
