"""Caches that forget: extras."""
