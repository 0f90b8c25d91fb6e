"""Record a run of a converted model as a list of ops: each with its node, and its values in two precisions."""
