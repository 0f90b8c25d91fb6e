"""Rewrites to one spelling: of ops that are spelled as others, and of regions of autocast."""
