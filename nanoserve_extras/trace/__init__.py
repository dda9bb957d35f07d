"""What the scheduler and the cache did, step by step: recorded, or played without a model."""
