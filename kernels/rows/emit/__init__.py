"""Emits Triton and C++ source from row programs."""
