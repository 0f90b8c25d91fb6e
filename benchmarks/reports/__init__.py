"""What a benchmark found: its rows, its table on the screen, its files."""
