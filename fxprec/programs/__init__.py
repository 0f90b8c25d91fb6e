"""A captured graph as what runs: its program, how it is called, what it reads, and the graph module users get of it."""
