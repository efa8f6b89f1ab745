"""The update of weights by AdamW. Only training calls it, outside compiled graphs."""
