"""count_casts: casts that run, told apart by what they cast."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import fxprec
from fxprec.testing import count_casts


def net():
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4))


def test_eager_autocast():
    x = torch.randn(2, 3, requires_grad=True)
    with count_casts() as casts, torch.autocast("cpu", torch.bfloat16):
        net()(x).float().sum().backward()
    assert (casts.weights, casts.weight_gradients) == (4, 4)
    assert (casts.activations, casts.gradients) == (2, 2)
    assert casts.total == 12


def test_a_view_of_a_weight_is_a_weight():
    weight = nn.Parameter(torch.randn(3, 4))
    with count_casts() as casts:
        weight.t().bfloat16().sum().backward()
    assert (casts.weights, casts.weight_gradients, casts.total) == (1, 1, 2)


def test_only_float_to_float_counts():
    x = torch.arange(4)
    with count_casts() as casts:
        x.float().long()
        x.float().to(torch.float32).bool()
        x.float().clone()
        x.float().to(torch.float32, copy=True)
    assert casts.total == 0


def test_what_a_checkpoint_recomputes_is_no_gradient():
    model, x = net(), torch.randn(2, 3)
    with count_casts() as casts:
        checkpoint(lambda x: model(x.bfloat16().float()), x, use_reentrant=False).sum().backward()
    assert (casts.activations, casts.gradients) == (4, 0)


def test_gradients_that_are_differentiated_again():
    x = torch.randn(2, 3, requires_grad=True)
    with count_casts() as casts:
        torch.autograd.grad(x.bfloat16().sum(), x, create_graph=True)
    assert (casts.activations, casts.gradients) == (1, 1)


def test_nothing_counts_after_the_block():
    with count_casts() as casts:
        pass
    torch.randn(2).bfloat16()
    assert casts.total == 0


def test_a_converted_model_casts_no_weights_and_refreshes_them_at_once():
    model, _ = fxprec.convert(net(), dtype=torch.bfloat16)
    x = torch.randn(2, 3)
    model(x).sum().backward()
    with count_casts() as casts:
        model(x).sum().backward()
    assert (casts.weights, casts.weight_gradients, casts.refreshes) == (0, 4, 1)
    assert casts.activations == 2


def test_dynamo_runs_its_graphs_under_it():
    model, _ = fxprec.convert(net(), capture="dynamo", dtype=torch.bfloat16)
    with count_casts():
        model(torch.randn(2, 3)).sum().backward()
    assert not fxprec.report(model).headline.net
