"""Folders of weights: their files, digests and locks. The settings of a run are in `blocks.training`."""
