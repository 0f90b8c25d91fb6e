"""How a benchmark measures: interleaved, timed, counted, written to files and drawn."""
