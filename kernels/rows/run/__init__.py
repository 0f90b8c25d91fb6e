"""Runs row programs: plans of a region for its inputs, launches, and the autograd function of both directions."""
