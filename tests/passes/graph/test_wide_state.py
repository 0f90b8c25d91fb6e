"""wide_state: a recurrent op rounds no state, and is no further off than eager autocast."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import Tensor, nn

import fxprec
from fxprec.passes.graph.wide_state import WITH_WIDE_STATE
from fxprec.passes.ops.table import OP_TABLE


class Loop(nn.Module):
    """A recurrent layer, or a cell in a loop, whose gates keep nearly all of the state."""

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, size = kind(4, 8), 8
        with torch.no_grad():
            for name, parameter in self.inner.named_parameters():
                if name.startswith("bias_ih"):
                    parameter[size : 2 * size] += 5

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(self.inner, nn.GRU):
            return self.inner(x)[1]
        state = x.new_zeros(x.shape[1], 8)
        if isinstance(self.inner, nn.GRUCell):
            for step in x:
                state = self.inner(step, state)
            return state
        pair = state, state
        for step in x:
            pair = self.inner(step, pair)
        return pair[0]


@pytest.mark.parametrize("kind", [nn.GRU, nn.GRUCell, nn.LSTMCell])
def test_a_state_drifts_no_more_than_under_autocast(kind):
    model, x = Loop(kind), torch.randn(60, 3, 4, generator=torch.Generator().manual_seed(1)) * 0.3 + 0.5
    exact = copy.deepcopy(model).double()(x.double())
    with torch.autocast("cpu", torch.bfloat16):
        eager = model(x)
    converted, _ = fxprec.convert(model, dtype=torch.bfloat16)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ours = converted(x)
    assert (ours - exact).norm() <= 1.1 * (eager - exact).norm()


@pytest.mark.parametrize("low_state", [False, True])
@pytest.mark.parametrize("batch_sizes", [False, True])
def test_the_state_is_wide_whatever_arrives(low_state, batch_sizes):
    layer = nn.GRU(4, 8).bfloat16()
    x, state = torch.randn(5, 2, 4, dtype=torch.bfloat16), torch.zeros(1, 2, 8, dtype=torch.bfloat16)
    state = state if low_state else state.float()
    weights = list(layer.parameters())
    options = (True, 1, 0.0, False, False)
    arguments = (torch.tensor([2] * 5), state, weights, *options) if batch_sizes else (state, weights, *options, False)
    x = x.flatten(0, 1) if batch_sizes else x
    results = WITH_WIDE_STATE["gru"](x, *arguments, state=torch.float32)
    assert [each.dtype for each in results] == [torch.float32] * 2


def test_each_op_of_a_wide_state_has_its_call():
    assert WITH_WIDE_STATE.keys() == {name for name, row in OP_TABLE.items() if row.wide_state}
