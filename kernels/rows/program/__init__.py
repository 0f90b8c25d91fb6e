"""Derives row programs, forward and backward, from the graph of a region."""
