"""Capture by torch._dynamo, held to what the interpreter does."""
