"""The server around `LLM`: an asynchronous engine, HTTP endpoints, metrics."""
