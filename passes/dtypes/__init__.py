"""How dtypes of results follow from arguments."""
