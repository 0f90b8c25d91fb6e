"""Optimizer state in bfloat16, rounded stochastically: small updates survive on average.

Rounded to nearest, exp_avg_sq with beta2 = 0.999 would stop moving: bfloat16 has 8 bits. The random bits come from the
seed, the step and the tensor, so there is no generator that a skipped step could advance, or a resumed run lose.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fxprec.kernels.launch.rounding import rounding_offset, stochastic_round


@dataclass(frozen=True, slots=True)
class Rounding:
    """The dtype of the states, and the seed of their rounding.

    ``places``: id of each parameter -> its number, which gives its rounding bits of its own.
    """

    dtype: torch.dtype
    seed: int
    places: Mapping[int, int] = field(default_factory=dict)

    @staticmethod
    def of(dtype: torch.dtype | None, seed: int | None) -> Rounding | None:
        """From an optimizer's arguments; None: states have the parameters' dtype.

        Raises:
            ValueError: another dtype than bfloat16; a seed without a low dtype, or none in 0 to 2**31 - 1.
        """
        if seed is not None and not 0 <= seed < 2**31:
            raise ValueError(f"seed must be in 0 to 2**31 - 1, not {seed}")
        if dtype is None:
            if seed is not None:
                raise ValueError("seed is that of the rounding of a low state_dtype: give state_dtype=torch.bfloat16")
            return None
        if dtype is not torch.bfloat16:
            raise ValueError(f"state_dtype must be torch.bfloat16, not {dtype!r}")
        return Rounding(dtype, int(torch.randint(2**31, ())) if seed is None else seed)

    def places_of(self, owners: Sequence[Tensor]) -> list[int]:
        """The numbers of some parameters."""
        return [self.places[id(owner)] for owner in owners]

    def write(
        self,
        targets: Mapping[str, Sequence[Tensor]],
        values: Mapping[str, Sequence[Tensor]],
        steps: Sequence[Tensor],
        owners: Sequence[Tensor],
    ) -> None:
        """Round ``values``, FP32 or FP64, into ``targets``, states of ``owners``.

        What bfloat16 holds stays, so after a skipped step nothing moves.
        """
        places = self.places_of(owners)
        for number, name in enumerate(targets):
            for target, value, step, place in zip(targets[name], values[name], steps, places, strict=True):
                offset = rounding_offset(int(step.item()), place, number)
                target.copy_(stochastic_round(value.float(), self.seed, offset))
