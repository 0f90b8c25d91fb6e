"""Costs of casts and ops, in bytes or in seconds: whether lowering an op pays."""
