"""The errors fxprec raises: each says what is wrong, where, why, and what to do.

They derive from the built-in type that a caller would expect (ValueError, TypeError, RuntimeError), so that code which
catches those keeps working.
"""

__all__ = [
    "CaptureError",
    "ClosureError",
    "ConversionError",
    "FxprecError",
    "InvariantError",
    "LossScaleError",
    "LossScaleFloorError",
    "NoGradientsError",
    "NotCapturedError",
    "PolicyError",
]


class FxprecError(Exception):
    """Base of everything that fxprec raises on purpose."""


class ConversionError(FxprecError, RuntimeError):
    """The model cannot be converted as it stands (already converted, wrapped, quantized, frozen, ...)."""


class CaptureError(FxprecError, RuntimeError):
    """No graph could be captured in the way that was asked for."""


class NotCapturedError(CaptureError):
    """A graph was asked for before the first call captured one."""


class PolicyError(FxprecError, ValueError):
    """A policy is malformed or one of its overrides matches nothing."""


class InvariantError(FxprecError, AssertionError):
    """A pass broke an invariant of the rewritten graph: a bug in fxprec, not in the model."""


class LossScaleError(FxprecError, ValueError, AssertionError):
    """A loss scaler's argument or state is out of range. (``AssertionError`` is what torch's scaler raises.)"""


class LossScaleFloorError(FxprecError, RuntimeError):
    """The loss scale fell to its floor: gradients overflow at every scale."""


class NoGradientsError(FxprecError, AssertionError):
    """An optimizer is to step and none of its parameters has a gradient. (torch raises ``AssertionError``.)"""


class ClosureError(FxprecError, TypeError, RuntimeError):
    """A closure was given to a scaled step. (torch raises ``RuntimeError``.)"""
