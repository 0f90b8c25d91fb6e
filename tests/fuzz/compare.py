"""What two worlds gave, side by side: structure, numbers and dtypes exactly, floats as the case is judged."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.fuzz.snapshot import Leaves
from tests.fuzz.source import Judged

__all__ = ["different", "is_chaotic", "stayed_wide"]

_LOW = (torch.bfloat16, torch.float16)
#: Of the largest value of a tensor. FP32's own rounding, in another order; a state that changed is off by far more.
_UNROUNDED = 1e-4
_ROUNDED = 2**-5


@dataclass(frozen=True)
class Tolerance:
    """How far floats may be off. ``largest``: of all that is compared; sums that cancel are off by its rounding."""

    judged: Judged
    largest: float

    def allowed(self, expected: Tensor, autocast: Any) -> float | None:
        """None: any value will do."""
        size = _size(expected)
        if self.judged == "unrounded":
            return _UNROUNDED * size + 1e-6 * (1 + self.largest)
        if not isinstance(autocast, Tensor) or autocast.shape != expected.shape or not expected.isfinite().all():
            return None
        error = (autocast.double() - expected.double()).abs().amax().item() if expected.numel() else 0.0
        return 2 * error + _ROUNDED * (self.largest + 0.1)


def _size(value: Any) -> float:
    """The largest finite magnitude."""
    if not isinstance(value, Tensor) or not value.is_floating_point() or not value.numel():
        return 0.0
    return value.detach().double().nan_to_num(0.0, 0.0, 0.0).abs().amax().item()


def different(ours: Leaves, eager: Leaves, autocast: Leaves | None, judged: Judged, outputs: bool) -> str | None:
    """The first thing that differs, or None. ``outputs``: dtypes must be those of the original program."""
    if len(ours) != len(eager) or any(a[0] != b[0] for a, b in zip(ours, eager, strict=True)):
        extra = [path for path, _ in ours if path not in dict(eager)], [p for p, _ in eager if p not in dict(ours)]
        return f"other parts: ours has {extra[0][:5]}, eager has {extra[1][:5]}"
    known = dict(autocast or ())
    tolerance = Tolerance(judged, max((_size(value) for _, value in eager), default=0.0))
    for (path, value), (_, expected) in zip(ours, eager, strict=True):
        why = _differs(value, expected, known.get(path), tolerance, outputs)
        if why is not None:
            return f"{path or 'the value'}: {why}"
    return None


def stayed_wide(ours: Leaves, eager: Leaves, autocast: Leaves) -> bool:
    """Whether every float is FP32's to the last bit, though eager autocast's are not."""
    floats = [i for i, (_, value) in enumerate(eager) if isinstance(value, Tensor) and value.is_floating_point()]
    if len(autocast) != len(eager) or all(_same(autocast[i][1], eager[i][1]) for i in floats):
        return False
    return all(_same(ours[i][1], eager[i][1]) for i in floats)


def is_chaotic(eager: Leaves, autocast: Leaves) -> bool:
    """Whether rounding alone made some value another one altogether: what comes after depends on it."""
    if len(autocast) != len(eager):
        return False
    pairs = [(a, b) for (_, a), (_, b) in zip(eager, autocast, strict=True) if isinstance(a, Tensor)]
    return any(
        a.is_floating_point() and a.shape == b.shape and a.numel() and (a.double() - b.double()).abs().amax() > _size(a)
        for a, b in pairs
        if isinstance(b, Tensor)
    )


def _same(one: Tensor, two: Tensor) -> bool:
    return one.shape == two.shape and bool(((one.double() == two) | (one.isnan() & two.isnan())).all())


def _differs(value: Any, expected: Any, autocast: Any, tolerance: Tolerance, outputs: bool) -> str | None:
    if type(value) is not type(expected):
        return f"{_shown(value)}, expected {_shown(expected)}"
    if isinstance(value, Tensor):
        return _tensors_differ(value, expected, autocast, tolerance, outputs)
    if isinstance(value, float) and tolerance.judged != "exact":
        other = torch.tensor(autocast, dtype=torch.float64) if isinstance(autocast, float) else None
        one, two = torch.tensor(value, dtype=torch.float64), torch.tensor(expected, dtype=torch.float64)
        return _tensors_differ(one, two, other, tolerance, outputs)
    if value != expected or (isinstance(value, float) and math.copysign(1, value) != math.copysign(1, expected)):
        return f"{_shown(value)}, expected {_shown(expected)}"
    return None


def _tensors_differ(value: Tensor, expected: Tensor, autocast: Any, tolerance: Tolerance, outputs: bool) -> str | None:
    if value.shape != expected.shape:
        return f"shape {tuple(value.shape)}, expected {tuple(expected.shape)}"
    if value.dtype != expected.dtype and (outputs or tolerance.judged == "exact" or value.dtype not in _LOW):
        return f"{value.dtype}, expected {expected.dtype}"
    if tolerance.judged == "exact" or not expected.is_floating_point():
        return None if _equal(value, expected) else f"{_shown(value)}, expected {_shown(expected)}"
    allowed = tolerance.allowed(expected, autocast)
    if allowed is None or not value.numel():
        return None
    one, two = value.double(), expected.double()
    same = (one == two) | (one.isnan() & two.isnan())
    off = torch.where(same, 0.0, (one - two).abs()).amax().item()
    if not off <= allowed:
        return f"{_shown(value)}, expected {_shown(expected)} (off by {off:.3g}, allowed {allowed:.3g})"
    return None


def _equal(one: Tensor, two: Tensor) -> bool:
    if not one.is_floating_point():
        return torch.equal(one, two)
    # by value and sign; NaN is NaN
    return bool(((one == two) & (one.signbit() == two.signbit()) | (one.isnan() & two.isnan())).all())


def _shown(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{value.flatten()[:8].tolist()} ({str(value.dtype).removeprefix('torch.')})"
    return f"{value!r} ({type(value).__name__})"
