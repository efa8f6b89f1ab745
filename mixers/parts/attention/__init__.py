"""Softmax attention, its caches and its gated and slotted variants. Rotary embeddings are in `mixers.parts`."""
