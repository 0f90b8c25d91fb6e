"""From a region's graph to row programs, forward and backward."""
