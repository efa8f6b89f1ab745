"""Models trained on the sequence by gradient descent: TTT-Linear and the neural memory of Titans."""
