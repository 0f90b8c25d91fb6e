"""From row programs to launches, and gradients."""
