"""Instruments: programs that look at the engine, measure it, or check it. Deletable."""
