"""Row programs: what a fused region computes, as a small typed program, and the Triton kernel made from it."""
