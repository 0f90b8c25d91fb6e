"""Moves the step counters of an optimizer's states into one tensor, so that one addition counts all of them.

``state["step"]`` stays a 0-dim tensor for each parameter, as torch's optimizers and checkpoints expect. On a CPU
``torch._foreach_add_`` takes 1 to 3 µs for each, which for small parameters is as much as the update itself::

    before   step, step, step        three allocations, three additions
    after    [step, step, step]      three views of one tensor, one addition
"""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor


class Counters:
    """Cache of the tensors that hold the step counters of one optimizer."""

    def __init__(self) -> None:
        self._kept: dict[Hashable, tuple[Tensor, list[int]]] = {}

    def __reduce__(self) -> tuple[type[Counters], tuple[()]]:
        """Return an empty cache for copies and pickles: it holds addresses."""
        return Counters, ()

    def of(self, key: Hashable, steps: list[Tensor]) -> list[Tensor]:
        """Return the tensors to add to in place of ``steps``: one [number of steps] that holds all of them, in order.

        Return ``steps`` themselves if they must not be moved: on devices other than a CPU, whose kernels take many at
        once; in memory shared between processes; and if one occurs twice, which counts twice.

        Args:
            key: of the cache; the next steps with the same key mostly have the same addresses.
            steps: 0-dim, of one dtype and device. They stay the same objects, and their memory moves once.
        """
        if steps[0].device.type != "cpu" or torch.compiler.is_compiling():
            return steps
        addresses = [*map(Tensor.data_ptr, steps)]
        kept = self._kept.get(key)
        if kept is not None and kept[1] == addresses:
            return [kept[0]]
        # Other processes would go on counting in the old memory.
        if any(map(Tensor.is_shared, steps)) or len({*addresses}) < len(addresses):
            return steps
        together = torch.stack([*steps])
        for step, place in zip(steps, together.unbind(), strict=True):
            # ``data`` moves the memory under the same tensor object, which states and checkpoints hold.
            step.data = place
        self._kept[key] = together, [*map(Tensor.data_ptr, steps)]
        return [together]
