"""From a row program to Triton source."""
