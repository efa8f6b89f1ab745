"""Abstract configs that several mixers share."""
