"""Speculative decoding: an extra."""
