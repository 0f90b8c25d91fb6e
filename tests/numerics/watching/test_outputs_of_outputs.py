"""Outputs that are computed of other outputs: what came from outside is told from what came through those."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxprec
from fxprec.numerics import locate, watch

pytestmark = pytest.mark.filterwarnings("ignore::fxprec.SlowDtypeWarning", "ignore::fxprec.NonFiniteWarning")


class Chain(nn.Module):
    """Three outputs, each of the one before; the root of a row of zeros has an infinite slope."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = self.first(x)
        z = y * (x[:, :1] < 5)
        return y, z, z.square().sum(1).sqrt()


def loss_of(outputs: Any, target: Tensor) -> Tensor:
    """Where the target is 1 the loss itself has a gradient that is not finite, of the first output."""
    y, z, norm = outputs
    own = (y[:, 0] * 0 + (1 - target)).sqrt().sum()
    return y.square().mean() + z.sum() + norm.mean() + own


def batch(rooted: bool, own: bool) -> tuple[Tensor, Tensor]:
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(3))
    target = torch.zeros(6)
    if rooted:
        x[2, 0] = 9
    if own:
        target[1] = 1
    return x, target


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("level", ["O0", "O1"])
@pytest.mark.parametrize(("rooted", "own"), [(True, False), (False, True)])
def test_the_one_that_is_at_fault_is_named(level: Any, scaled: bool, rooted: bool, own: bool) -> None:
    torch.manual_seed(0)
    scaler = fxprec.LossScaler(init_scale=64.0) if scaled else None
    model, scaler = fxprec.convert(Chain(), level=level, scaler=scaler)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, optimizer, scaler) as watcher:
        for asked in (False, True, False):
            x, target = batch(asked and rooted, asked and own)
            optimizer.zero_grad()
            scaler.scale(loss_of(model(x), target)).backward()
            scaler.step(optimizer)
            scaler.update()
    [trip] = watcher.trips
    assert trip.finding is not None
    if own:
        assert "the gradient of outputs[0]" in str(trip), str(trip)
    else:
        found = locate(model, batch(rooted, own), loss_of)
        assert (trip.finding.node, trip.finding.kind) == (found.node, found.kind), str(trip)
        assert "sqrt" in str(trip) and "backward" in str(trip)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)])
def test_what_is_kept_is_what_came_from_outside(order: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    model = fxprec.convert(Chain(), level="O0").module
    x, _ = batch(False, False)
    model(x)  # the graph is captured
    with watch(model, on_finding=lambda _: None) as watcher:
        outputs = model(x)
        [call] = watcher._alive
        came = [torch.randn_like(output) for output in outputs]
        for number in order:
            outputs[number].backward(came[number], retain_graph=True)
        inside = {number: sum(call.gradients[number]) for number in order}
        call.keep_what_came_from_outside(model)
        kept = {number: gradient for number, [gradient] in call.gradients.items()}
        call.keep_what_came_from_outside(model)
    assert kept.keys() == inside.keys() == {0, 1, 2}
    for number, gradient in kept.items():
        torch.testing.assert_close(gradient, came[number])
        assert (number == 2) == bool(torch.allclose(inside[number], came[number])), "the others got more"
