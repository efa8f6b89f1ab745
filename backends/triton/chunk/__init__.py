"""The chunked update: plan, operator, forward and backward.

Decoding, elementwise scans and other operators have their own folders.
"""
