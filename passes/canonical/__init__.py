"""What ``canonicalize`` rewrites: ops that are spelled as others."""
