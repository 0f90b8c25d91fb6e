"""Plans of shadow reads: when one copy of all weights does, and when the store has to look at each."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fxprec.shadows import ShadowStore
from fxprec.shadows.entry import Entry
from fxprec.shadows.store import CachedRead


@pytest.fixture
def weights() -> list[Tensor]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.randn(5)), nn.Parameter(torch.randn(2, 2))]


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """One element each time the store looks at one weight after the other."""
    found: list[bool] = []
    sync = ShadowStore._copy_changed

    def counted(store: ShadowStore, pairs: list, everything: bool) -> None:
        found.append(everything)
        sync(store, pairs, everything)

    monkeypatch.setattr(ShadowStore, "_copy_changed", counted)
    return found


def forward(store: ShadowStore, weights: list[Tensor]) -> list[Tensor]:
    """The reads of a forward that records gradients; shadows must be the rounded weights afterwards."""
    store.begin()
    shadows = store.read(weights)
    for shadow, weight in zip(shadows, weights, strict=True):
        assert torch.equal(shadow, weight.detach().bfloat16())
    return shadows


def cached_read_of(weights: list[Tensor]) -> CachedRead:
    return CachedRead.of(weights, [Entry.of(weight, torch.bfloat16, None, lambda _: None) for weight in weights])


@pytest.mark.parametrize("fused", [True, False], ids=["fused: no version tells", "versions tell"])
def test_a_step_on_all_weights_is_one_copy(weights: list[Tensor], looks: list[bool], fused: bool):
    store = ShadowStore(torch.bfloat16)
    optimizer = torch.optim.AdamW(weights, lr=0.1, fused=fused)
    forward(store, weights)
    looks.clear()
    for _ in range(3):
        for weight in weights:
            weight.grad = torch.ones_like(weight)
        versions = [shadow._version for shadow in forward(store, weights)]
        optimizer.step()
        shadows = forward(store, weights)
        assert all(shadow._version > version for shadow, version in zip(shadows, versions, strict=True))
    assert looks == []


def test_a_forward_without_a_step_keeps_the_versions_of_the_shadows(weights: list[Tensor], looks: list[bool]):
    store = ShadowStore(torch.bfloat16)
    forward(store, weights)
    looks.clear()
    versions = [shadow._version for shadow in forward(store, weights)]
    for weight in weights:
        weight.data.mul_(2)  # which nothing shows
    assert [shadow._version for shadow in forward(store, weights)] == versions
    assert looks == []


def test_a_step_on_some_weights_is_looked_at(weights: list[Tensor], looks: list[bool]):
    store = ShadowStore(torch.bfloat16)
    forward(store, weights)
    looks.clear()
    before = [shadow._version for shadow in forward(store, weights)]
    weights[1].grad = torch.ones_like(weights[1])
    torch.optim.SGD([weights[1]], lr=0.1, fused=True).step()
    after = [shadow._version for shadow in forward(store, weights)]
    assert [b > a for a, b in zip(before, after, strict=True)] == [False, True, False]
    with torch.no_grad():
        weights[2].add_(1)  # one version of three
    again = [shadow._version for shadow in forward(store, weights)]
    assert [b > a for a, b in zip(after, again, strict=True)] == [False, False, True]
    assert looks == [True, True]


def test_a_copy_by_one_read_is_known_to_another(weights: list[Tensor], looks: list[bool]):
    store = ShadowStore(torch.bfloat16)
    forward(store, weights)
    forward(store, weights[::-1])  # the same weights in another order
    looks.clear()
    with torch.no_grad():
        for weight in weights:
            weight.add_(1)
    versions = [shadow._version for shadow in forward(store, weights)]
    assert looks == []
    after = [shadow._version for shadow in forward(store, weights[::-1])[::-1]]
    assert after == versions  # no change since: two forwards before one backward are legal


def test_weights_of_another_read_are_looked_at(weights: list[Tensor], looks: list[bool]):
    store = ShadowStore(torch.bfloat16)
    forward(store, weights[:1])
    forward(store, weights[1:])
    looks.clear()
    for weight in weights:
        weight.data.mul_(2)
    forward(store, weights[:1])
    assert looks == [True]
    with torch.no_grad():
        for shadow, weight in zip(store.read(weights[1:]), weights[1:], strict=True):
            assert torch.equal(shadow, weight.bfloat16())


@pytest.mark.parametrize(
    "change",
    [
        lambda weight: weight.requires_grad_(False),
        lambda weight: setattr(weight, "data", weight.data.clone()),
        lambda weight: setattr(weight, "data", weight.data[:2]),
    ],
    ids=["frozen", "moved", "pruned"],
)
def test_a_shadow_that_no_longer_fits_is_made_again(weights: list[Tensor], looks: list[bool], change):
    store = ShadowStore(torch.bfloat16)
    old = forward(store, weights)
    store.note_stepping(weights)
    looks.clear()
    change(weights[0])
    assert cached_read_of(weights).changed([weights[1], weights[0], weights[2]]) is None
    new = forward(store, weights)
    assert looks == [True]
    assert new[0] is not old[0] and new[1] is old[1]
    assert new[0].requires_grad is weights[0].requires_grad


def test_only_frozen_weights_are_copied_when_they_show_a_change(looks: list[bool]):
    weight = torch.randn(3)
    store = ShadowStore(torch.bfloat16)
    forward(store, [weight])
    refreshes = store.refreshes
    forward(store, [weight])
    assert store.refreshes == refreshes
    weight.add_(1)
    forward(store, [weight])
    assert store.refreshes == refreshes + 1


def test_what_a_cached_read_sees(weights: list[Tensor]):
    cached = cached_read_of(weights)
    assert cached.holds(weights) and cached.changed(weights) is False
    with torch.no_grad():
        weights[0].add_(1)
    assert not cached.holds(weights) and cached.changed(weights) is None
    with torch.no_grad():
        weights[1].add_(1)
        weights[2].add_(1)
    assert cached.changed(weights) is True
    cached.note_versions(weights)
    assert cached.holds(weights)
    assert cached_read_of([weights[0], weights[0]]).distinct == 1
