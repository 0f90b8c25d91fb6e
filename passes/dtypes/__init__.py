"""Dtypes of results, told from those of the arguments."""
