"""Kernels for all parameters of an optimizer in one launch."""
