"""Images and sounds in prompts: an extra."""
