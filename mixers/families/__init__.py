"""Abstract configs that several mixers share. A part of a mixer is in `mixers.parts`."""
