"""Training: text, the training loop, checkpoints and reports."""
