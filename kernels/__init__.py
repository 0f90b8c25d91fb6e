"""What runs on a device: one kernel a file, with its launcher and its eager reference."""

if __name__ != "fxprec.kernels":
    # Found as a top-level 'kernels' from the checkout's root. It must not load twice, and must not pass for the PyPI
    # package of that name either, which transformers looks for: a package without file and content counts as absent.
    globals().update(__path__=[], __file__=None)
