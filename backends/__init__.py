"""Floor 0: what the update means and who computes it; no nn.Module."""
