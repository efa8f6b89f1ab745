"""Models trained on the sequence by gradient descent, in chunks: all gradients of a chunk are taken at its start."""
