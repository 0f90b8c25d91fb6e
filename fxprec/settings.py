"""The checked arguments of one conversion."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch

from fxprec.passes.context import Context
from fxprec.passes.policy import Policy
from fxprec.program import Executor

__all__ = ["Settings", "one_of"]

Capture = Literal["auto", "symbolic", "dynamo"]
Placement = Literal["mincut", "autocast"]


@dataclass(frozen=True, slots=True)
class Settings:
    """What a conversion was asked to do; picklable, so that a saved or copied model can redo it.

    Raises:
        ValueError: an unknown dtype, placement, capture, executor or ``lower``; says which there are and the nearest.
    """

    policy: Policy
    dtype: torch.dtype
    device: str = "cpu"
    placement: Placement = "mincut"
    lower: Literal["always", "pays"] = "always"
    fuse: bool | Literal["auto"] = "auto"
    capture: Capture = "auto"
    executor: Executor = "eager"
    keep_output_dtype: bool = True

    def __post_init__(self) -> None:
        one_of("placement", self.placement, get_args(Placement))
        one_of("capture", self.capture, get_args(Capture))
        one_of("executor", self.executor, get_args(Executor))
        one_of("lower", self.lower, ("always", "pays"))
        one_of("fuse", self.fuse, (True, False, "auto"))
        if self.dtype not in (torch.float16, torch.bfloat16):
            raise ValueError(
                f"dtype={self.dtype!r}: models are lowered to torch.float16 or torch.bfloat16; "
                "leave dtype out for float16 on CUDA and bfloat16 elsewhere"
            )

    def context(self) -> Context:
        """What the passes see of it."""
        return Context(
            low=self.dtype,
            policy=self.policy,
            placement=self.placement,
            device=self.device,
            keep_output_dtype=self.keep_output_dtype,
            native_mixed=self.fuse is not False,
        )


def one_of(name: str, value: Any, choices: tuple[Any, ...]) -> None:
    """Raise a ValueError that lists the choices and the nearest one."""
    if any(value is choice or (isinstance(value, str) and value == choice) for choice in choices):
        return
    near = difflib.get_close_matches(str(value), [str(choice) for choice in choices], n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ValueError(f"{name}={value!r} is none of {', '.join(map(repr, choices))}{hint}")
