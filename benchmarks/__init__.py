"""Benchmarks: commands, run from the checkout's root as ``python -m benchmarks.NAME``; not installed."""
