if __name__ != "fxprec.kernels":  # found as a top-level 'kernels' from the checkout's root: it would load twice
    raise ImportError("import fxprec.kernels, not kernels")
