"""Floor 1: modules that mix along time."""
