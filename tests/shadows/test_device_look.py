"""The comparison that a store has made on a device, here of tensors of the CPU in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fxprec.optim
import kernel_tools
from fxprec.shadows import ShadowStore

by_device = pytest.mark.parametrize("device", kernel_tools.DEVICES)


@pytest.mark.slow
def test_the_store_in_the_interpreter() -> None:
    kernel_tools.run_in_the_interpreter(__file__)


@pytest.fixture
def weights(device: str, monkeypatch: pytest.MonkeyPatch) -> list[nn.Parameter]:
    from fxprec.shadows.samples import DeviceLook

    monkeypatch.setattr("fxprec.shadows.store.look_at", DeviceLook)
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(shape, device=device)) for shape in ((7, 5), (7,), (300, 41))]


def assert_fresh(store: ShadowStore, weights: list[nn.Parameter]) -> None:
    store.begin()
    shadows = store.read(weights)
    assert all(torch.equal(low, weight.half()) for low, weight in zip(shadows, weights, strict=True))


@by_device
@pytest.mark.parametrize("recording", [True, False], ids=["training", "no_grad"])
def test_a_write_past_the_counters_is_seen(weights: list[nn.Parameter], recording: bool) -> None:
    store = ShadowStore(torch.float16)
    optimizer = fxprec.optim.SGD(weights, lr=0.1)
    for _ in range(3):
        assert_fresh(store, weights)
        for weight in weights:
            weight.grad = torch.ones_like(weight)
        optimizer.step()
        refreshes = store.refreshes
        with torch.set_grad_enabled(recording):
            assert_fresh(store, weights)
            assert store.refreshes == refreshes  # the optimizer wrote them
            weights[0].data.mul_(2)
            assert_fresh(store, weights)
            for weight in weights:
                weight.data.mul_(3)
            assert_fresh(store, weights)
            assert store.refreshes == refreshes  # the device copied by itself
