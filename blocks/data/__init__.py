"""Training data: texts, their parts and their batches. The training loop is in `blocks.training`."""
