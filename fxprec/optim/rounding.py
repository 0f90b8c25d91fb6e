"""Rounds optimizer states and low parameters stochastically, so that small updates survive on average.

Rounded to nearest, exp_avg_sq with beta2 = 0.999 would stop moving: bfloat16 has 8 bits. The random bits come from the
seed, the step and the tensor, so there is no generator that a skipped step could advance, or a resumed run lose.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from fxprec.host_reads import capturing
from fxprec.kernels.launch.rounding import rounding_offset, stochastic_round

#: Keys of an optimizer's groups: the seed of its rounding, and how often parameters were rounded.
SEED: Final = "rounding_seed"
COUNT: Final = "rounding_count"
_LOW: Final = (torch.bfloat16, torch.float16)
#: Number of the parameter itself in ``rounding_offset``; its states have the numbers below.
_PARAMETER: Final = 3


def checked_seed(seed: int | None, wanted: bool, for_what: str) -> int:
    """Return the seed of a rounding, drawn from torch's generator if none is given and one is ``wanted``.

    Raises:
        ValueError: a seed for no rounding, or none in 0 to 2**31 - 1.
    """
    if seed is not None and not 0 <= seed < 2**31:
        raise ValueError(f"seed must be in 0 to 2**31 - 1, not {seed}")
    if seed is not None and not wanted:
        raise ValueError(f"seed is that of the rounding of {for_what}")
    return seed if seed is not None else int(torch.randint(2**31, ())) if wanted else 0


def is_low(parameter: Tensor) -> bool:
    """Return whether a parameter is bfloat16 or float16, and so rounded when it is stored."""
    return parameter.dtype in _LOW


@dataclass(frozen=True, slots=True)
class Rounding:
    """Stochastic rounding in one step: of low parameters with their states, or of states in a lower dtype.

    Attributes:
        seed: of the optimizer.
        places: id of each parameter -> its number in the optimizer, so that each draws bits of its own.
        count: another number for each step; None: each parameter's own step count tells.
    """

    seed: int
    places: Mapping[int, int]
    count: int | None = None

    def places_of(self, owners: Sequence[Tensor]) -> list[int]:
        """Return the numbers of some parameters."""
        return [self.places[id(owner)] for owner in owners]

    def write(
        self, targets: Mapping[str, Sequence[Tensor]], values: Mapping[str, Sequence[Tensor]], owners: Sequence[Tensor],
        steps: Sequence[Tensor] = (),
    ) -> None:  # fmt: skip
        """Round ``values``, FP32 or FP64, into "params" or states of ``owners``. ``steps``: where there is no count.

        Values that the low dtype holds stay, so a skipped step changes nothing.

        Raises:
            RuntimeError: a CUDA graph is being captured, whose replays would round with the same bits each.
        """
        if self.count is None:
            counts = [int(step.item()) for step in steps]
        elif capturing(owners[0].device):  # the count is a number on the host, which a graph would record once
            raise RuntimeError("stochastic_rounding draws other bits at each step, which a CUDA graph cannot")
        else:
            counts = [self.count] * len(owners)
        places = self.places_of(owners)
        for number, name in enumerate(targets):
            number = _PARAMETER if name == "params" else number
            for target, value, place, count in zip(targets[name], values[name], places, counts, strict=True):
                if target is not value:  # a state that is FP32 is written already
                    offset = rounding_offset(count, place, number)
                    target.copy_(stochastic_round(value.float(), self.seed, offset, target.dtype))
