"""Policies: a level, rows for custom ops, and overrides, in Python or as TOML files."""

from fxprec.passes.policy.policy import Policy

__all__ = ["Policy"]
