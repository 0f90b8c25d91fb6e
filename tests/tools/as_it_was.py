"""A question to a model leaves it bit for bit as it was."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

import fxprec


@contextlib.contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Within the block nothing of a converted model changes: state, gradients, graphs; nor do random numbers."""
    before, graphs = _state(model), _graphs(model)
    yield
    torch.testing.assert_close(_state(model), before, rtol=0, atol=0, equal_nan=True)
    assert _graphs(model)[: len(graphs)] == graphs


def _state(model: nn.Module) -> list[Any]:
    tensors = [*model.parameters(), *model.buffers()]
    gradients = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    modes = [module.training for module in model.modules()]
    return [[tensor.detach().clone() for tensor in tensors], gradients, torch.get_rng_state(), modes]


def _graphs(model: nn.Module) -> list[str]:
    try:
        return [str(gm.graph) for gm in fxprec.graphs(model)]
    except fxprec.NotCapturedError:
        return []
