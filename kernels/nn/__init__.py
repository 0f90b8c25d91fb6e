"""Hand-written kernels of whole operations, each a torch op with autograd; ``fxprec.kernels`` names them all."""
