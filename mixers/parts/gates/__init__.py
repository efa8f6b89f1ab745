"""Gates and decays of the recurrence and of its output. Projections and norms are in `mixers.parts`."""
