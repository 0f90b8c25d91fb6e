"""The errors fxprec raises: each says what is wrong, where, why, and what to do.

They derive from the built-in type that a caller would expect (ValueError, TypeError, RuntimeError), so that code which
catches those keeps working.
"""

__all__ = [
    "CaptureError",
    "ConversionError",
    "FxprecError",
    "InvariantError",
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
