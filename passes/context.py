"""What a pass may ask besides the graph: one frozen object for the whole pipeline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from fxprec.passes.policy import Policy

__all__ = ["Context"]


@dataclass(frozen=True, slots=True)
class Context:
    """Settings of one conversion, as the passes see them.

    Attributes:
        low: the low dtype, float16 or bfloat16.
        policy: level, op rules and overrides.
        placement: where casts go: "mincut" (cheapest assignment) or "autocast" (forward promotion as torch.autocast).
        device: device type of the parameters, "cpu" or "cuda".
        keep_output_dtype: cast module outputs back to the dtype of the original program.
        native_mixed: norms, sums and means may read low input in their native mixed kernels.
    """

    low: torch.dtype
    policy: Policy
    placement: Literal["mincut", "autocast"] = "mincut"
    device: str = "cpu"
    keep_output_dtype: bool = True
    native_mixed: bool = True
