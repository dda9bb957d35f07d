"""Embeddings, classes and scores: an extra."""
