"""A request's way in and out: prompts, requests, text, logprobs, metrics."""
