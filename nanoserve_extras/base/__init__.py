"""What all extras share: the `LLM` that takes them, with the words, numbers and files it knows."""
