"""The same operators, fast; and what there is of a device: memory, graphs, its choice."""
