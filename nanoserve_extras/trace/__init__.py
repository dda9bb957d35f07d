"""The work of scheduler and cache, step by step: recorded, or simulated without a model."""
