"""Optimizers that unscale, check, clip, update and write the shadows in one pass."""
