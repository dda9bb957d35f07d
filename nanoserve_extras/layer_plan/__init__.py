"""Layers on other ranks, or on disk: an extra."""
