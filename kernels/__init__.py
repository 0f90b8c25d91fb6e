"""Kernels for GPUs and CPUs, one a file, with their launchers.

For direct use: ``fxprec.kernels.cross_entropy(logits, target)`` and the other functions named in ``__all__``, torch ops
with autograd that run as plain torch without Triton.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fxprec.kernels.nn.batch_norm import batch_norm
    from fxprec.kernels.nn.cross_entropy import cross_entropy
    from fxprec.kernels.nn.group_norm import group_norm
    from fxprec.kernels.nn.linear_cross_entropy import linear_cross_entropy
    from fxprec.kernels.nn.rope import rope, rope_qk

__all__ = ["batch_norm", "cross_entropy", "group_norm", "linear_cross_entropy", "rope", "rope_qk"]

_MODULES = {name: name for name in __all__} | {"rope_qk": "rope"}


def __getattr__(name: str) -> Any:
    """Import a function when it is first used: its file loads Triton."""
    if name in _MODULES:
        return getattr(import_module(f"fxprec.kernels.nn.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


if __name__ != "fxprec.kernels":
    # Found as a top-level 'kernels' from the checkout's root. It must not load twice, and must not pass for the PyPI
    # package of that name either, which transformers looks for: a package without file and content counts as absent.
    for _name in [name for name in globals() if not name.startswith("_")]:
        del globals()[_name]
    del __all__, __getattr__
    globals().update(__path__=[], __file__=None)
