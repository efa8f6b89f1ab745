"""Products of few rows with the weights of linear maps, and the operations around them, for decoding."""
