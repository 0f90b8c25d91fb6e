"""What frameworks want beside ``convert``: a module each, which imports its framework when it is imported itself."""
