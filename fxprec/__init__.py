"""fxprec: a compiler-pass precision rewriter on torch.fx.

``model, scaler = fxprec.convert(model)`` rewrites a PyTorch model to mixed precision as a graph that one can read.
"""

from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

from fxprec.convert import Converted, convert
from fxprec.errors import (
    CaptureError,
    ConversionError,
    FxprecError,
    InvariantError,
    NotCapturedError,
    PolicyError,
)
from fxprec.inference import accumulate, freeze, refresh
from fxprec.inspection.report import explain, report
from fxprec.loss_scaler import LossScaler
from fxprec.module import graph_module, graphs, original, revert
from fxprec.passes.ir import Rule
from fxprec.passes.policy import Policy

if TYPE_CHECKING:
    from fxprec import testing

__version__ = "0.1.0"

__all__ = [
    "CaptureError",
    "ConversionError",
    "Converted",
    "FxprecError",
    "InvariantError",
    "LossScaler",
    "NotCapturedError",
    "Policy",
    "PolicyError",
    "Rule",
    "accumulate",
    "convert",
    "explain",
    "freeze",
    "graph_module",
    "graphs",
    "original",
    "refresh",
    "report",
    "revert",
    "testing",
]


def __getattr__(name: str) -> ModuleType:
    """``fxprec.testing`` is imported when it is used."""
    if name == "testing":
        return import_module("fxprec.testing")
    raise AttributeError(f"module 'fxprec' has no attribute {name!r}")
