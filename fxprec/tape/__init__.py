"""A run of a converted model as a list of ops: each with the node it came from, and its values in two precisions."""
