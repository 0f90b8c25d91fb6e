"""A converted model: the user's own object, the graphs that serve its calls, and what it may not do."""
