"""The parts of pack."""
