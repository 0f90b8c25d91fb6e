"""Advise a dtype and a loss scale from measured ranges: what float16 would lose of values that FP32 can hold."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

from fxprec.numerics.range_table import Range, flushed_of, percent, power
from fxprec.passes.graph.text import dtype_name
from fxprec.scaling.scale import LARGEST_SCALE, SMALLEST_SCALE

_F16: Final = torch.finfo(torch.float16)
#: Bits that the largest safe scale leaves to the largest gradient.
_HEADROOM: Final = 2
#: Bits that the largest value of the forward must have left in float16: training moves it.
_ROOM: Final = 1
#: Of the gradients so many more may become 0 at a useful scale than at the largest safe one.
_MORE: Final = 0.001
#: Of all gradients so many may become 0 in float16.
_FLUSHED: Final = 0.01
#: Where this share of one value, or of one parameter's gradient, becomes 0, it is lost.
_LOST: Final = 0.5


@dataclass(frozen=True, slots=True)
class Advice:
    """Advice on the dtype and loss scale of a model; attributes as of ``Ranges``."""

    dtype: torch.dtype | None
    reasons: tuple[str, ...]
    scale: float | None
    smallest_scale: float | None
    why_no_scale: str = ""


def advise(rows: Sequence[Range], low: torch.dtype, ran_at: float, fault: str = "") -> Advice:
    """Return the dtype and the loss scales that fit the values of a run, with the figures that decide so.

    Args:
        rows: of a run in bfloat16, whose exponents are FP32's; or in float16, where nothing else is known.
        low: the dtype that it ran in: what is in it would be in float16.
        ran_at: the loss scale of the run.
        fault: which batches were not finite, in words; "": none.
    """
    name = dtype_name(low)
    lowered = [row for row in rows if row.dtype == name]
    if not lowered:
        why = "no value of the run is in low precision"
        return Advice(None, (why,), None, None, why)
    forward = [row for row in lowered if row.phase == "forward"]
    backward = [row for row in lowered if row.phase == "backward" and row.values.some + row.values.overflowed]
    scale = _largest_scale([row for row in rows if row.phase == "backward"], backward, low, ran_at)
    useful = None if scale is None else _smallest_scale(backward, scale, ran_at)
    # Anything that float16 would break decides for bfloat16: a fit is claimed only where nothing speaks against it.
    against = [*_too_large(forward), *_too_small(forward)]
    why = "" if scale is not None else _why_no_scale(fault or (backward and f"gradients are not finite in {name}"))
    if backward and why:
        against.append(why)
    if scale is not None:
        weights = {row.node for row in forward if row.kind == "weight"}
        gradients = [row for row in rows if row.phase == "backward" and row.kind == "weight" and row.node in weights]
        against += _lost_gradients(backward, gradients, scale, scale / ran_at)
    if against:
        return Advice(torch.bfloat16, tuple(against), scale, useful, why)
    reasons = [_fits(forward)] if forward else []
    if scale is not None:
        lost = percent(flushed_of(backward, torch.float16, scale / ran_at))
        reasons.append(f"{lost} of the gradients become 0 at a loss scale of {power(scale)}")
    reasons.append("float16 has three bits of precision more than bfloat16")
    return Advice(torch.float16, tuple(reasons), scale, useful, why)


def _largest_scale(rows: Sequence[Range], lowered: Sequence[Range], low: torch.dtype, ran_at: float) -> float | None:
    """Return the largest power of two that leaves all gradients their headroom, or None where no gradient is low.

    Gradients in low precision are held against float16's range, others against that of their own dtype.
    """
    if not lowered or any(row.values.overflowed or row.values.nans for row in rows):
        return None
    rooms = [
        math.log2(_F16.max if row.dtype == dtype_name(low) else torch.finfo(getattr(torch, row.dtype)).max)
        - math.log2(row.values.largest)
        for row in rows
        if row.values.largest
    ]
    scale = 2.0 ** math.floor(math.log2(ran_at) + min(rooms, default=math.inf) - _HEADROOM)
    return min(max(scale, SMALLEST_SCALE), 2.0 ** math.floor(math.log2(LARGEST_SCALE)))


def _why_no_scale(fault: object) -> str:
    return f"{fault}: fxprec.numerics.locate says where that begins" if fault else "no gradient is in low precision"


def _smallest_scale(backward: Sequence[Range], scale: float, ran_at: float) -> float:
    """Return the smallest scale, from 1.0 up, at which hardly more gradients become 0 than at the largest one."""
    most = flushed_of(backward, torch.float16, scale / ran_at) + _MORE
    while scale > 1 and flushed_of(backward, torch.float16, scale / 2 / ran_at) <= most:
        scale /= 2
    return scale


def _where(row: Range) -> str:
    return row.node + (f" of module {row.module}" if row.module else "") + (f" ({row.source})" if row.source else "")


def _too_large(forward: Sequence[Range]) -> list[str]:
    # Measured overflows come first: what is beyond float16's range in a run with FP32's exponents is only foreseen.
    over = [row for row in forward if row.values.overflowed]
    if over:
        return [f"{_where(over[0])} overflows" + _more(over)]
    beyond = sorted(
        (row for row in forward if row.values.largest > _F16.max / 2**_ROOM), key=lambda row: -row.values.largest
    )
    if not beyond:
        return []
    largest = beyond[0].values.largest
    left = "beyond" if largest > _F16.max else f"less than {_ROOM} bit below"
    return [f"{_where(beyond[0])} reaches {largest:.3g}, {left} float16's {_F16.max:g}" + _more(beyond)]


def _too_small(forward: Sequence[Range]) -> list[str]:
    lost = [row for row in forward if row.flushed_in(torch.float16) > _LOST]
    if not lost:
        return []
    share = percent(lost[0].flushed_in(torch.float16))
    return [f"{share} of {_where(lost[0])} would be 0 in float16" + _more(lost)]


def _lost_gradients(backward: Sequence[Range], weights: Sequence[Range], scale: float, larger: float) -> list[str]:
    """Return which gradients float16 loses even at the largest safe scale, ``larger`` times as large as in the run."""
    found = []
    lost = [row for row in weights if row.flushed_in(torch.float16, larger) > _LOST]
    if lost:
        found.append(
            f"the gradient of {lost[0].node} would be 0 in float16 at a loss scale of {power(scale)}" + _more(lost)
        )
    share = flushed_of(backward, torch.float16, larger)
    if share > _FLUSHED:
        # Where even the best scale flushes too many, the distance from smallest to largest explains it better than a
        # name.
        seen = [row.values for row in backward if row.values.some]
        smallest, largest = min(each.smallest for each in seen), max(each.largest for each in seen)
        found.append(
            f"gradients span {math.log2(largest / smallest):.0f} binades, and float16 has 40: {percent(share)} of them "
            f"become 0 at the largest safe loss scale, {power(scale)}"
        )
    return found


def _more(rows: Sequence[Range]) -> str:
    return f", and {len(rows) - 1} more" if len(rows) > 1 else ""


def _fits(forward: Sequence[Range]) -> str:
    widest = max(forward, key=lambda row: row.values.largest)
    room = math.log2(_F16.max) - math.log2(widest.values.largest) if widest.values.largest else math.inf
    return f"the largest value of the forward, {widest.values.largest:.3g} in {_where(widest)}, leaves {room:.1f} bits"
