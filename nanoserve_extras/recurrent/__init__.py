"""Networks with states beside the KV cache: an extra."""
