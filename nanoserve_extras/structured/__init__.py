"""Text that follows a grammar: an extra."""
