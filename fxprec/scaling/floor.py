"""Notice that a scale fell to its floor, without a host sync.

An overflow at the floor is the end: gradients hold inf or nan at every scale, and every further step is skipped. On a
CPU the scale is read at once; on CUDA it is copied to pinned memory, and looked at when the copy is done, an update or
two later.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from fxprec.scaling.loss_scale import LossScale

__all__ = ["SMALLEST_SCALE", "FloorWatch"]

#: The smallest scale whose reciprocal is a normal FP32 number.
SMALLEST_SCALE = 2.0**-126


class FloorWatch:
    """Watches the scales of a scaler; ``floor``: its ``min_scale``, or None for the smallest that can be taken out."""

    def __init__(self, floor: float | None) -> None:
        self.floor = SMALLEST_SCALE if floor is None else floor
        self._copies: list[tuple[Tensor, torch.cuda.Event]] = []

    def __reduce__(self) -> tuple[type[FloorWatch], tuple[float]]:
        return FloorWatch, (self.floor,)

    def fallen(self, updated: Iterable[tuple[LossScale, Tensor]]) -> bool:
        """After an update: whether a loss that overflowed is at the floor, as far as is known.

        Args:
            updated: each scale and the ``found_inf`` that moved it.
        """
        for loss, found in updated:
            assert loss.scale is not None
            if loss.scale.device.type != "cuda":
                if found > 0 and loss.scale <= self.floor:
                    return True
                continue
            hit = (found > 0) & (loss.scale <= self.floor)
            host = torch.empty_like(hit, device="cpu", pin_memory=torch.cuda.is_available())
            host.copy_(hit, non_blocking=True)
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(loss.scale.device))
            self._copies.append((host, event))
        done = [host for host, event in self._copies if event.query()]
        self._copies = [(host, event) for host, event in self._copies if not event.query()]
        return any(bool(host) for host in done)
