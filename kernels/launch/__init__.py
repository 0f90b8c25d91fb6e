"""What every kernel needs: Triton where there is one, torch ops, who is watching, random numbers, rounding."""
