"""The parts of ``fuse``: which nodes can be in a region, which are, and what is rewritten so that more can be."""
