if __name__ != "fxprec.passes":  # found as a top-level 'passes' from the checkout's root: it would load twice
    raise ImportError("import fxprec.passes, not passes")
