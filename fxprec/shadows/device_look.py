"""Weights on a CUDA device against what was noted of them, without the host waiting for what is found."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from fxprec.kernels.launch.triton_support import can_launch
from fxprec.kernels.optim.changed_copies import ChangedCopies
from fxprec.kernels.optim.lists import is_dense
from fxprec.shadows.entry import Entry
from fxprec.shadows.samples import Samples


def can_look_at(weight: Tensor) -> bool:
    """Return whether the kernels can: else a weight is copied at each forward, whatever happened to it."""
    return can_launch(weight.device) and is_dense(weight)


class DeviceLook:
    """A ``Look`` at dense weights on a CUDA device, which copies them to their shadows if one of them changed."""

    def __init__(self, samples: Samples, pairs: Sequence[tuple[Tensor, Entry]]) -> None:
        self._samples = samples
        self._copies = ChangedCopies(
            [weight.detach() for weight, _ in pairs],
            [entry.alias for _, entry in pairs],
            [entry.samples for _, entry in pairs],
            [entry.row for _, entry in pairs],
        )

    def same(self) -> bool:
        """Return True: what differs is copied by the time that the next kernel runs."""
        self._copies.launch(self._samples.values)
        return True

    def note(self) -> None:
        """Write to each row what its weight is now."""
        self._copies.note(self._samples.values)
