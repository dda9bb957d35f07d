"""Weights of 8 and 4 bits: an extra."""
