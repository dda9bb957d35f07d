"""Networks that transformers has: an extra."""
