"""A captured graph, rewritten: what a capture gives, and a conversion keeps."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import GraphModule

from fxprec.capture.guards import Guards
from fxprec.passes.runner import run_passes
from fxprec.program import Program, lift
from fxprec.settings import Settings

__all__ = ["Captured", "rewrite"]


@dataclass(frozen=True, slots=True, eq=False)
class Captured:
    """One rewritten graph of a method, or of a piece of it between two graph breaks.

    Attributes:
        method: its name, as ``MethodName`` writes it.
        entry: number of the entry point that it serves: that of the class, or of a function set on the instance.
        gm: the graph that users see.
        program: what runs for it.
        training: the mode that the method's module was in.
        guards: what static capture read; None for a graph of dynamo, which guards by itself.
    """

    method: str
    entry: int
    gm: GraphModule
    program: Program
    training: bool
    guards: Guards | None = None


def rewrite(gm: GraphModule, settings: Settings) -> Program:
    """Run the passes on a captured graph, in place, and make its program."""
    run_passes(gm, settings.context(gradients=torch.is_grad_enabled()))
    return lift(gm, settings.dtype, settings.executor, settings.device)
