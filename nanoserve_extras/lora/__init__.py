"""LoRA adapters: an extra."""
