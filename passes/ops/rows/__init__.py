"""The rows of the op table. Data only."""
