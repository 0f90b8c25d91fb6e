"""The net: torch.autocast in all but its cache, and put back as it was, in each thread apart."""

from __future__ import annotations

import contextlib
import threading
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxprec
from fxprec.model.net import Net, inside_net, without_net

LOW = torch.bfloat16


def _state():
    return (
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.is_autocast_cache_enabled(),
        inside_net(),
    )


def test_matmuls_are_low_inside_and_all_is_put_back():
    before = _state()
    x = torch.randn(2, 2)
    with Net("cpu", torch.float16):
        assert _state() == (True, torch.float16, False, True)
        with Net("cpu", LOW):
            assert (x @ x).dtype is LOW
        assert _state() == (True, torch.float16, False, True)
    assert _state() == before
    with pytest.raises(KeyError), Net("cpu", LOW):
        raise KeyError
    assert _state() == before


@pytest.mark.parametrize("devices", [("cpu", "cuda"), ("cuda", "cpu", "cuda")])
def test_nets_of_two_devices_are_left_and_entered_again(devices):
    def states():
        return [(torch.is_autocast_enabled(each), torch.get_autocast_dtype(each)) for each in ("cpu", "cuda")]

    before, cached = states(), torch.is_autocast_cache_enabled()
    with contextlib.ExitStack() as nets:
        for device in devices:
            nets.enter_context(Net(device, LOW))
        within = states()
        assert within == [(True, LOW)] * 2
        with without_net():
            assert (states(), torch.is_autocast_cache_enabled()) == (before, cached)
        assert (states(), torch.is_autocast_cache_enabled()) == (within, False)
    assert (states(), torch.is_autocast_cache_enabled()) == (before, cached)


def test_within_an_autocast_of_the_user():
    with torch.autocast("cpu", dtype=torch.float16):
        before = _state()
        with Net("cpu", LOW):
            assert torch.get_autocast_dtype("cpu") is LOW
        assert _state() == before


def test_other_threads_are_outside():
    seen = []
    with Net("cpu", LOW):
        thread = threading.Thread(target=lambda: seen.append(_state()))
        thread.start()
        thread.join()
    assert seen == [(False, torch.get_autocast_dtype("cpu"), True, False)]


class Outer(nn.Module):
    """Leaves its inner module to the interpreter, which runs it in the net of this one."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, x):
        x = F.linear(x, self.weight)
        torch._dynamo.graph_break()
        return self.inner(x)


def test_a_converted_module_in_the_net_of_another_does_not_take_it_for_the_users(tools):
    model = Outer()
    fxprec.convert(model)
    fxprec.convert(model.inner)
    x = torch.randn(2, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert tools.matmul_dtypes(model, x) == {LOW: 2}
    with torch.autocast("cpu", dtype=LOW), pytest.warns(UserWarning, match="called under torch.autocast") as caught:
        model.inner(x)
    assert caught[0].filename == __file__
