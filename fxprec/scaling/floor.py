"""Notice that overflows took a scale to its floor, without a host sync.

That is the end: gradients hold inf or nan at every scale, and every further step would be skipped.

Most updates cost nothing: a scale of 2**16 that halves at most once an update needs 16 of them to come to a floor of 1.
Only when it may have come there, each update notes on the device whether an overflow left it at the floor. Where
reading does not wait (a CPU) this is read at once; on CUDA it is copied to pinned memory and looked at when the copy is
done, an update or two later.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from fxprec.scaling.arguments import SMALLEST_SCALE
from fxprec.scaling.cuda_graphs import capturing
from fxprec.scaling.loss_scale import LossScale, UpdateRule
from fxprec.scaling.on_host import OnHost


class _Note(NamedTuple):
    """Note of what an update found."""

    found: OnHost
    update: int


class FloorWatch:
    """Watches the scales of a scaler.

    Args:
        floor: its ``min_scale``; None: the smallest whose reciprocal is finite.
    """

    def __init__(self, floor: float | None) -> None:
        self.floor = SMALLEST_SCALE if floor is None else floor
        self.reset()

    def reset(self) -> None:
        """The scales are others than after the last update: nothing is known of them."""
        self._updates = 0
        self._safe_until = 0
        self._notes: list[_Note] = []

    @property
    def near(self) -> bool:
        """Return whether the next update may bring a scale to the floor."""
        return self._updates >= self._safe_until

    def note(self, updated: list[tuple[LossScale, Tensor]], losses: list[LossScale], rule: UpdateRule) -> None:
        """After an update: note whether an overflow took a loss's scale to the floor, or found it there.

        Args:
            updated: each loss that was checked, with its ``found_inf``.
            losses: all of them.
            rule: how they moved.
        """
        if rule.backoff_factor >= 1:
            return  # a static scale falls nowhere
        if self.near and not capturing(updated[0][1].device):
            scales = torch.stack([loss.scale for loss in losses if loss.scale is not None])
            hits = [_fell(self.floor, loss, found, rule) for loss, found in updated]
            self._notes.append(_Note(OnHost.of(torch.stack([scales.amin(), *hits])), self._updates))
        self._updates += 1

    def fallen(self, backoff_factor: float) -> bool:
        """Return whether a scale fell to the floor, as far as is known."""
        if not self._notes:
            return False
        fallen, waiting = False, list[_Note]()
        for note in self._notes:
            if not note.found.done():
                waiting.append(note)
                continue
            scale, *hits = note.found.values.tolist()
            fallen |= any(hits)
            if scale > self.floor:
                steps = math.log(self.floor / scale) / math.log(backoff_factor)
                # One less, for what rounding does to the logarithms and to the scale.
                self._safe_until = max(self._safe_until, note.update + int(steps) - 1)
        self._notes = waiting
        return fallen


def _fell(floor: float, loss: LossScale, found: Tensor, rule: UpdateRule) -> Tensor:
    """1.0 after an overflow that leaves the scale at the floor, unless hysteresis tolerates it."""
    assert loss.scale is not None and loss.hysteresis_left is not None
    hit = (found > 0) & (loss.scale <= floor)
    return (hit & (loss.hysteresis_left <= 0) if rule.hysteresis > 1 else hit).float()
