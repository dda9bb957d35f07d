"""What a value must be, and what vLLM's names mean here."""
