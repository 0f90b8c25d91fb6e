"""Functions that rewritten graphs call in place of torch's: one op a file, with the conditions of its kernel."""
