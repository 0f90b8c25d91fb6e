"""Integrate with frameworks beside ``convert``: a module each, which imports its framework when imported itself."""
