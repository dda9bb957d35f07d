"""Tools: programs that use the engine, measure it, or check it. Deletable."""
