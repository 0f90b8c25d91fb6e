"""as_strided looks at memory by strides of its own: no copy in another dtype stands in for its argument."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import fxprec


class Net(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.table, self.function = nn.Linear(8, 8), nn.Linear(8, 8), nn.Embedding(20, 8), function
        self.gaps = nn.Parameter(torch.randn(8, 16)[:, ::2])

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> Any:
        return self.function(self, x, ids)


def windows(m: Net, x: torch.Tensor, ids: torch.Tensor) -> Any:
    """Read overlapping windows of all tokens but the first, as models of long texts do."""
    tokens = m.table(ids)[:, 1:]
    rows, step, column = tokens.stride()
    return m.a(tokens.as_strided((3, 4, 3, 8), (rows, step, step, column)))


def of_an_input(m: Net, x: torch.Tensor, ids: torch.Tensor) -> Any:
    return m.a(x[:, :6].as_strided((3, 4, 3, 8), (56, 8, 8, 1)))


def of_what_is_returned(m: Net, x: torch.Tensor, ids: torch.Tensor) -> Any:
    h = m.a(x)[1:]
    return m.b(h.as_strided((2, 7, 8), (56, 8, 1), 0)), h


def of_repeated_rows(m: Net, x: torch.Tensor, ids: torch.Tensor) -> Any:
    v = m.a(x[0, 0]).view(8, 1).expand(8, 8)
    return m.b(v), v, v.as_strided((8,), (1,))


def of_a_weight_with_gaps(m: Net, x: torch.Tensor, ids: torch.Tensor) -> Any:
    return m.a(x), m.a(x) * m.gaps.as_strided((8,), (2,))


@pytest.mark.parametrize("capture", ["symbolic", "dynamo"])
@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize(
    "function", [windows, of_an_input, of_what_is_returned, of_repeated_rows, of_a_weight_with_gaps]
)
def test_it_sees_the_memory_of_the_original(function: Any, level: Any, capture: Any) -> None:
    torch._dynamo.reset()
    original, inputs = Net(function), (torch.randn(3, 7, 8), torch.randint(0, 20, (3, 7)))
    converted, _ = fxprec.convert(Net(function), dtype=torch.bfloat16, level=level, capture=capture, scaler=False)
    ours, theirs = converted(*inputs), original(*inputs)
    for found, right in zip(ours, theirs, strict=True) if isinstance(theirs, tuple) else [(ours, theirs)]:
        assert (found - right).norm() <= 0.01 * right.norm()
        weights = torch.linspace(-1, 2, right.numel()).view_as(right)
        (found * weights).sum().backward(retain_graph=True)
        (right * weights).sum().backward(retain_graph=True)
    assert original.a.weight.grad is not None and converted.a.weight.grad is not None
    assert (converted.a.weight.grad - original.a.weight.grad).norm() <= 0.02 * original.a.weight.grad.norm()
