"""What casts and ops cost, in bytes or in seconds."""
