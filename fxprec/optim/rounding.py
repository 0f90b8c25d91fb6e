"""Rounds optimizer states and low parameters stochastically, so that small updates survive on average.

Rounded to nearest, exp_avg_sq with beta2 = 0.999 would stop moving: bfloat16 has 8 bits. The random bits come from the
seed, the step and the tensor, so there is no generator that a skipped step could advance, or a resumed run lose.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
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
class ParameterRounding:
    """Stochastic rounding of low parameters, and of their states in that dtype, in one step.

    Attributes:
        seed: of the optimizer.
        count: another number for each step.
        places: id of each parameter -> its number in the optimizer.
    """

    seed: int
    count: int
    places: Mapping[int, int]

    def write(
        self, lists: Mapping[str, Sequence[Tensor]], values: Mapping[str, Sequence[Tensor]], owners: Sequence[Tensor]
    ) -> None:
        """Round FP32 ``values`` into "params" and the states of ``lists``, which are all low and of ``owners``.

        Values that the low dtype holds stay, so a skipped step changes nothing.

        Raises:
            RuntimeError: a CUDA graph is being captured, whose replays would round with the same bits each.
        """
        # The count is a number on the host, which a graph would record once.
        if capturing(lists["params"][0].device):
            raise RuntimeError("stochastic_rounding draws other bits at each step, which a CUDA graph cannot")
        states = [name for name in lists if name not in ("params", "grads", "step")]
        for number, name in [*enumerate(states), (_PARAMETER, "params")]:
            for target, value, owner in zip(lists[name], values[name], owners, strict=True):
                if target is not value:  # a state that is FP32 is written already
                    offset = rounding_offset(self.count, self.places[id(owner)], number)
                    target.copy_(stochastic_round(value, self.seed, offset, target.dtype))


@dataclass(frozen=True, slots=True)
class Rounding:
    """Stochastic rounding of states: their dtype, and the seed.

    ``places``: id of each parameter -> its number, so that each draws bits of its own.
    """

    dtype: torch.dtype
    seed: int
    places: Mapping[int, int] = field(default_factory=dict)

    @staticmethod
    def of(dtype: torch.dtype | None, seed: int) -> Rounding | None:
        """Return the rounding for an optimizer's arguments; None if states have the parameters' dtype.

        Raises:
            ValueError: another dtype than bfloat16.
        """
        if dtype is None:
            return None
        if dtype is not torch.bfloat16:
            raise ValueError(f"state_dtype must be torch.bfloat16, not {dtype!r}")
        return Rounding(dtype, seed)

    def places_of(self, owners: Sequence[Tensor]) -> list[int]:
        """Return the numbers of some parameters."""
        return [self.places[id(owner)] for owner in owners]

    def write(
        self,
        targets: Mapping[str, Sequence[Tensor]],
        values: Mapping[str, Sequence[Tensor]],
        steps: Sequence[Tensor],
        owners: Sequence[Tensor],
    ) -> None:
        """Round ``values``, FP32 or FP64, into ``targets``, states of ``owners``.

        Values that bfloat16 holds stay, so a skipped step changes nothing.
        """
        places = self.places_of(owners)
        for number, name in enumerate(targets):
            for target, value, step, place in zip(targets[name], values[name], steps, places, strict=True):
                offset = rounding_offset(int(step.item()), place, number)
                target.copy_(stochastic_round(value.float(), self.seed, offset))
