"""The errors fxprec raises and the warnings it gives: each says what is wrong, where, why, and what to do.

Errors derive from the built-in type that a caller would expect (ValueError, TypeError, RuntimeError), so that code
which catches those keeps working. Warnings derive from ``FxprecWarning``, a ``UserWarning``; each kind has a class, to
filter by: ``warnings.filterwarnings("error", category=fxprec.ServiceWarning)``.
"""

import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches

from fxprec.kernels.torch_internals import TESTED_TORCH

__all__ = [
    "CaptureError",
    "ClosureError",
    "ConversionError",
    "FxprecError",
    "FxprecWarning",
    "GradientsWarning",
    "InvariantError",
    "LossScaleError",
    "LossScaleFloorError",
    "NoGradientsError",
    "NonFiniteError",
    "NonFiniteWarning",
    "NotCapturedError",
    "NotLoweredWarning",
    "OtherCallError",
    "PolicyError",
    "ServiceWarning",
    "SeveralGraphsError",
    "SlowDtypeWarning",
    "StaleShadowError",
    "UntestedTorchWarning",
    "UnusedSettingWarning",
]


class FxprecError(Exception):
    """Base of everything that fxprec raises on purpose."""


class ConversionError(FxprecError, RuntimeError):
    """The model cannot be converted as it stands (already converted, wrapped, quantized, frozen, ...)."""


class CaptureError(FxprecError, RuntimeError):
    """No graph could be captured in the way that was asked for."""


class NotCapturedError(CaptureError):
    """A graph was asked for before the first call captured one."""


class SeveralGraphsError(NotCapturedError):
    """The one graph of a method was asked for that has several, with Python code between them."""


class OtherCallError(FxprecError, ValueError):
    """A graph module is called in another way than the one that it was captured for, which is built into it."""


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


class NonFiniteError(FxprecError, FloatingPointError):
    """A training step that is watched came upon inf or nan; it was skipped."""


class ClosureError(FxprecError, TypeError, RuntimeError):
    """A closure was given to a scaled step. (torch raises ``RuntimeError``.)"""


class StaleShadowError(FxprecError, RuntimeError):
    """A weight was written in a way that nothing shows, and the low copy that a graph reads is the old value's."""


class FxprecWarning(UserWarning):
    """Base of every warning that fxprec gives."""


class NotLoweredWarning(FxprecWarning):
    """A method that ``convert(methods=)`` named runs in FP32: only a part of the converted model is left."""


class SlowDtypeWarning(FxprecWarning):
    """The low dtype is slower than FP32 on this device."""


class GradientsWarning(FxprecWarning):
    """Gradients are not what they seem: float16 without a loss scale, low ones widened, a scale at its floor."""


class NonFiniteWarning(FxprecWarning):
    """A training step that is watched came upon inf or nan; it was skipped."""


class ServiceWarning(FxprecWarning):
    """Something less than wished serves: no fused kernels, shipped costs, no graph, or one that gives bare tensors."""


class UnusedSettingWarning(FxprecWarning):
    """Something that the user set has no effect here: a registration after the fact, an autocast context around."""


class UntestedTorchWarning(FxprecWarning):
    """This torch is newer than those that fxprec was tested with."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return the names that one may have meant, `` (did you mean 'a' or 'b'?)``, or nothing."""
    found = get_close_matches(name, sorted(set(known)), n=3, cutoff=0.5)
    return f" (did you mean {' or '.join(map(repr, found))}?)" if found else ""


def few(names: Sequence[str], most: int = 5) -> str:
    """List the first names, and how many more there are: ``a, b and 3 more``."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def warn_if_untested(version: str, missing: Mapping[str, str]) -> None:
    """Warn of a newer minor version than those tested, and of private names that are not there.

    Args:
        version: of torch.
        missing: private names of torch that were not found, and what goes without each.
    """
    newest = TESTED_TORCH[-1]
    newer = _minor(version) > _minor(newest)
    if not newer and not missing:
        return
    said = [f"torch {version} is newer than {newest}, the newest that fxprec was tested with"] if newer else []
    said += [f"torch {version} has no {name}: {without}" for name, without in missing.items()]
    warnings.warn(
        f"{'; '.join(said)}. Before you rely on it compare a model with its original (fxprec.original), or install "
        f"torch {newest} or a newer fxprec. To silence this: "
        "warnings.filterwarnings('ignore', message='torch .*fxprec')",
        UntestedTorchWarning,
        stacklevel=3,
    )


def _minor(version: str) -> tuple[int, ...]:
    found = re.match(r"(\d+)\.(\d+)", version)
    return tuple(map(int, found.groups())) if found else (0, 0)
