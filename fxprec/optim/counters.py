"""The step counters of an optimizer's states, in one piece of memory: one addition in place of one for each parameter.

``state["step"]`` stays a 0-dim tensor of its own for each parameter, as torch's optimizers and checkpoints have it. On
a CPU ``torch._foreach_add_`` takes 1 to 3 µs for each, which at small sizes is as much as the update itself::

    before   step, step, step        three allocations, three additions
    after    [step, step, step]      three views of one tensor, one addition
"""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor


class Counters:
    """Where the counters of one optimizer lie, as long as they lie there."""

    def __init__(self) -> None:
        self._kept: dict[Hashable, tuple[Tensor, list[int]]] = {}

    def __reduce__(self) -> tuple[type[Counters], tuple[()]]:
        """Copies and pickles are empty: what is kept are addresses."""
        return Counters, ()

    def of(self, key: Hashable, steps: list[Tensor]) -> list[Tensor]:
        """What to add to in place of ``steps``: one tensor [number of steps] in whose memory all of them lie, in order.

        ``steps`` themselves where they are not to be moved: on other devices than a CPU, whose kernels take many at
        once; in memory that is shared between processes; and a step that is there twice, which counts twice.

        Args:
            key: says whose they are: the next ones with the same key are taken to lie in the same place.
            steps: 0-dim, of one dtype and device. They stay the same objects, and move where they lie elsewhere.
        """
        if steps[0].device.type != "cpu" or torch.compiler.is_compiling():
            return steps
        addresses = [*map(Tensor.data_ptr, steps)]
        kept = self._kept.get(key)
        if kept is not None and kept[1] == addresses:
            return [kept[0]]
        if any(map(Tensor.is_shared, steps)) or len({*addresses}) < len(addresses):
            return steps
        together = torch.stack([*steps])
        for step, place in zip(steps, together.unbind(), strict=True):
            step.data = place
        self._kept[key] = together, [*map(Tensor.data_ptr, steps)]
        return [together]
