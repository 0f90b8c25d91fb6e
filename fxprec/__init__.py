"""fxprec: a compiler-pass precision rewriter on torch.fx.

``model, scaler = fxprec.convert(model)`` rewrites a PyTorch model to mixed precision as a graph that one can read.
"""

from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

import torch

from fxprec import errors
from fxprec.convert import Converted, convert
from fxprec.errors import *  # noqa: F403
from fxprec.host_memory import keep_memory
from fxprec.inspection.explanation import explain
from fxprec.inspection.report import report
from fxprec.kernels.torch_internals import MISSING
from fxprec.model.conversion import original
from fxprec.model.graphs import graph_module, graphs
from fxprec.model.inference import accumulate, freeze, refresh
from fxprec.model.swapped import revert
from fxprec.passes.graph.annotations import Rule
from fxprec.passes.policy.policy import Policy
from fxprec.scaling.loss_scaler import LossScaler
from fxprec.whole_step import CapturedStep, capture_step

if TYPE_CHECKING:
    from fxprec import amp, fp16_utils, numerics, optim, parallel, testing

__version__ = "0.1.0"

__all__ = [
    "CapturedStep",
    "Converted",
    "LossScaler",
    "Policy",
    "Rule",
    "accumulate",
    "amp",
    "capture_step",
    "convert",
    "explain",
    "fp16_utils",
    "freeze",
    "graph_module",
    "graphs",
    "keep_memory",
    "numerics",
    "optim",
    "original",
    "parallel",
    "refresh",
    "report",
    "revert",
    "testing",
]
__all__ += errors.__all__

_ON_USE = ("amp", "fp16_utils", "numerics", "optim", "parallel", "testing")


errors.warn_if_untested(torch.__version__, MISSING)


def __getattr__(name: str) -> ModuleType:
    """These submodules are imported when they are used."""
    if name in _ON_USE:
        return import_module(f"fxprec.{name}")
    raise AttributeError(f"module 'fxprec' has no attribute {name!r}")


def __dir__() -> list[str]:
    """List what users import, without what it is made of."""
    return [*__all__, "__version__"]
