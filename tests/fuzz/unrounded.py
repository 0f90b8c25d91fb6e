"""Conversions whose casts, the library's own, copy where they convert, and do not round.

Whatever else a conversion does is as ever: capture, guards, which casts there are and where, when shadows are renewed.
So its results must be eager FP32's, and a wrong one is not taken for rounding. A user's own casts round.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

import fxprec.capture.dynamo.analysis
import fxprec.model.dynamic
import fxprec.programs.packed_weights
from fxprec.passes.graph.casts import CASTS
from fxprec.programs.program import Program, lift
from fxprec.settings import Executor
from fxprec.shadows import ShadowStore

__all__ = ["casts_that_do_not_round", "no_dynamo"]


@contextlib.contextmanager
def casts_that_do_not_round() -> Iterator[None]:
    """For conversions that are made and called within the block."""
    with (
        mock.patch.object(fxprec.programs.packed_weights, "lift", _lift),
        # FP64 holds FP32, there and back: shadows that are real ones, renewed as ever, and exact
        mock.patch.object(fxprec.model.dynamic, "ShadowStore", lambda dtype: ShadowStore(torch.float64)),
        mock.patch.object(fxprec.model.conversion.Conversion, "net_context", lambda self: contextlib.nullcontext()),
    ):
        yield


def _lift(gm: GraphModule, low: torch.dtype, executor: Executor = "eager", device: str = "cpu") -> Program:
    program = lift(gm, low, executor, device)
    for node in [node for node in program.gm.graph.nodes if node.target in CASTS]:
        guarded = node.args[0].meta["precision"].output is node.args[1]  # of a dtype nobody knew
        node.target = _same if guarded else _copied
    program.gm.recompile()
    count = len(program.low)

    def function(*arguments: Any) -> Any:
        return program.gm(*[weight.float() for weight in arguments[:count]], *arguments[count:])

    return replace(program, function=function)


def _same(value: Any, dtype: torch.dtype) -> Any:
    return value


def _copied(value: Any, dtype: torch.dtype) -> Any:
    return pytree.tree_map_only(Tensor, torch.clone, value)


@contextlib.contextmanager
def no_dynamo() -> Iterator[None]:
    """What a static trace declines runs as it is, in the net: a hundred times faster than by dynamo."""

    with mock.patch.object(fxprec.capture.dynamo.analysis, "why_not_now", lambda: "static capture alone is tested"):
        yield
