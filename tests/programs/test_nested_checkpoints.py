"""Activation checkpointing of regions that lie within each other."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import fxprec


class Dropped(nn.Module):
    """A layer whose mask a checkpoint has to draw again."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.dropout(self.linear(x)))


class Nested(nn.Module):
    """Regions within regions, ``depth`` of them, each with a layer; with a graph break before the outermost one."""

    def __init__(self, depth: int, breaks: bool = False, **options: Any) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Dropped() for _ in range(depth))
        self.breaks, self.options = breaks, {"use_reentrant": False, **options}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = checkpoint(self.from_block, 0, x, **self.options)
        if self.breaks:
            torch._dynamo.graph_break()
            x = checkpoint(self.from_block, 0, x, **self.options)
        return x

    def from_block(self, i: int, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks[i](x)
        return x if i + 1 == len(self.blocks) else checkpoint(self.from_block, i + 1, x, **self.options)


NESTED = {
    "two": partial(Nested, 2),
    "three": partial(Nested, 3),
    "three, in pieces": partial(Nested, 3, breaks=True),
    "other random numbers": partial(Nested, 2, preserve_rng_state=False),
    "reentrant": partial(Nested, 2, use_reentrant=True),
}


@pytest.mark.parametrize("made", NESTED.values(), ids=NESTED)
@pytest.mark.parametrize("level", ["O0", "O1"])
def test_regions_within_regions_draw_the_same_masks_again(level: str, made: Callable[[], Nested]):
    """At O0 equal to the original bit for bit, at O1 to autocast, and the random numbers move as far."""
    original = made()
    converted, _ = fxprec.convert(copy.deepcopy(original), level=level)
    x = torch.randn(4, 8)

    def step(model: nn.Module) -> list[torch.Tensor | None]:
        given = x.clone().requires_grad_()
        torch.manual_seed(3)
        out = model(given)
        between = torch.get_rng_state()
        out.square().sum().backward()
        gradients = [parameter.grad for parameter in model.parameters()]
        return [out.detach().float(), given.grad, *gradients, between, torch.get_rng_state()]

    # Before torch 2.11 autocast's cache keeps what a reentrant region cast without gradients, and its second run, which
    # reads that, has no gradient of the weight: ours has it, as FP32 has.
    cached = not original.options["use_reentrant"]
    with torch.autocast("cpu", torch.bfloat16, enabled=level == "O1", cache_enabled=cached):
        expected = step(original)
    for ours, theirs in zip(step(converted), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


class Counting(nn.Module):
    """A region that writes to what it reads: running statistics, and a buffer of its own."""

    def __init__(self, depth: int, **options: bool):
        super().__init__()
        self.layer, self.norm, self.last = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)
        self.register_buffer("seen", torch.zeros(()))
        self.depth, self.options = depth, {"use_reentrant": False} | options

    def region(self, x: torch.Tensor, depth: int) -> torch.Tensor:
        self.seen.add_(1)
        if depth:
            return self.last(checkpoint(self.region, x.relu(), depth - 1, **self.options))
        return self.norm(self.layer(x)) * x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(checkpoint(self.region, x, self.depth, **self.options))


@pytest.mark.parametrize("capture", ["auto", "dynamo"])
@pytest.mark.parametrize("level", ["O0", "O1"])
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_region_that_writes_to_buffers_runs_again(depth: int, level: str, capture: str):
    original = Counting(depth)
    converted, _ = fxprec.convert(copy.deepcopy(original), level=level, capture=capture)
    x = torch.randn(4, 8, requires_grad=True)
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16, enabled=level == "O1"):
            original(x).square().sum().backward()
        converted(x).square().sum().backward()
    for ours, theirs in zip(converted.parameters(), original.parameters(), strict=True):
        assert ours.grad is not None and theirs.grad is not None
        assert (ours.grad - theirs.grad).norm() <= (0 if level == "O0" else 3e-2) * theirs.grad.norm()
    for (name, ours), theirs in zip(converted.named_buffers(), original.buffers(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=0 if name in ("seen", "num_batches_tracked") else 1e-2)
