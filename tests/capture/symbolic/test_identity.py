"""A dtype or layout that is compared by ``is``: a trace has a proxy for it, so it declines, and dynamo answers."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import fxprec

F32 = torch.float32


def same(one: object, other: object) -> bool:
    return one is other


class Asking(nn.Module):
    def __init__(self, asks: Callable[[nn.Module, Tensor], bool]):
        super().__init__()
        self.layer, self.asks, self.given = nn.Linear(4, 4), asks, None

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x * 3 if self.asks(self, x) else x)


#: What asks, and whether a trace can answer.
CASES = {
    "a dtype": (lambda m, x: x.dtype is torch.float32, False),
    "not a dtype": (lambda m, x: x.dtype is not torch.float64, False),
    "the other way round": (lambda m, x: torch.float32 is x.dtype, False),
    "a layout": (lambda m, x: x.layout is torch.strided, False),
    "a dtype that a global has": (lambda m, x: x.dtype is F32, False),
    "two tensors' dtypes": (lambda m, x: x.dtype is x.abs().dtype, False),
    "in an expression": (lambda m, x: bool(m.given is None and (x.dtype is torch.float32) is True), False),
    "no dtype": (lambda m, x: m.given is None, True),
    "of objects": (lambda m, x: m.given is m.layer or type(m) is Asking, True),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_what_is_asked_is_answered_as_in_the_original(case: tuple[Callable[..., bool], bool]) -> None:
    asks, traced = case
    original, x = Asking(asks), torch.randn(2, 4)
    model, _ = fxprec.convert(copy.deepcopy(original), dtype=torch.bfloat16)
    torch.testing.assert_close(model(x), original(x), rtol=2e-2, atol=2e-2)
    declined = fxprec.report(model).headline.not_static
    assert bool(declined) is not traced
    assert traced or "by 'is'" in declined[0]
