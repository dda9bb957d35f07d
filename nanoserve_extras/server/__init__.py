"""The front door above `llm`: an asynchronous engine, an HTTP server, metrics."""
