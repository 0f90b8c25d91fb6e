"""Shared parts of all kernels: Triton if it is installed, torch ops, active tracers, random numbers, rounding."""
