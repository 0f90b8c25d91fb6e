"""Watch each step of a training loop: what is kept of it, the flag that skips it, and its replay."""
