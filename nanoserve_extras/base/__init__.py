"""What all extras share: the `LLM` that takes them, vLLM's names, metrics, and file formats."""
