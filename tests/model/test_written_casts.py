"""Casts of written memory that gave their very input in the original program, as in a scatter of message passing."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxprec


class Net(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.v, self.function = nn.Linear(8, 8), function

    def forward(self, x: Tensor, ids: Tensor) -> Any:
        return self.function(self, x, self.v(x), ids)


def zeros(h: Tensor) -> Tensor:
    return torch.zeros(10, 8, dtype=h.dtype)


def filled(h: Tensor, ids: Tensor) -> Tensor:
    out = torch.empty(10, 8, dtype=h.dtype)
    out[:] = h
    out[ids] = h * 2
    return out


def written_both(h: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    one = torch.zeros(10, 8).type_as(h)
    one.index_add_(0, ids, h)
    two = one.float()
    two.mul_(2)
    return one, two


FORMS: dict[str, Callable[..., Any]] = {
    "to an input's dtype": lambda m, x, h, ids: zeros(h).index_add_(0, ids, h).to(x.dtype),
    "float()": lambda m, x, h, ids: zeros(h).index_add_(0, ids, h).float(),
    "type_as an input": lambda m, x, h, ids: zeros(h).index_add_(0, ids, h).type_as(x),
    "to float32": lambda m, x, h, ids: zeros(h).add_(h).to(torch.float32).exp(),
    "by device and dtype": lambda m, x, h, ids: zeros(h).add_(h).to(x.device, x.dtype),
    "to a wide value's dtype": lambda m, x, h, ids: zeros(h).index_add_(0, ids, h).to(h.softmax(-1).dtype) * h,
    "to its own source's dtype": lambda m, x, h, ids: m.v(zeros(h).index_add_(0, ids, h).to(h.dtype)),
    "cast twice": lambda m, x, h, ids: torch.zeros(10, 8).to(h.dtype).index_add_(0, ids, h).to(x.dtype),
    "full": lambda m, x, h, ids: torch.full((10, 8), 0.5, dtype=h.dtype).index_add_(0, ids, h).to(x.dtype),
    "read low and cast": lambda m, x, h, ids: (m.v(filled(h, ids)), filled(h, ids).to(m.v.weight.dtype)),
    "both are written": lambda m, x, h, ids: written_both(h, ids),
}


@pytest.mark.filterwarnings("ignore::fxprec.FxprecWarning")
@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
@pytest.mark.parametrize("way", ["inputs", "none", "dynamo"])
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_values_and_gradients(form: Callable[..., Any], way: str, level: Any) -> None:
    torch._dynamo.reset()
    model, inputs = Net(form), (torch.randn(10, 8), torch.randperm(10))
    settings: dict[str, Any] = {"capture": "dynamo"} if way == "dynamo" else {}
    given = inputs if way == "inputs" else None
    lowered, _ = fxprec.convert(copy.deepcopy(model), given, dtype=torch.bfloat16, level=level, **settings)
    found = []
    for each in (lowered, model):
        out = each(*inputs)
        out = out if isinstance(out, tuple) else (out,)
        sum(part.square().sum() for part in out).backward()
        found.append([*out, each.v.weight.grad])
    for ours, theirs in zip(*found, strict=True):
        assert (ours - theirs).norm() <= 0.03 * theirs.norm()
    assert all(ours.dtype is torch.float32 for ours in found[0][:-1])
