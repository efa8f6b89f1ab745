"""Training: the loop, its settings, optimizer and evaluation, and reports.

Texts are in `blocks.data`, folders of weights in `blocks.checkpoints`.
"""
