"""Which calls of a frozen program run on packed weights, where weights are written past their version counters.

What packs is replaced, so that it runs on CPUs for which oneDNN packs no bfloat16 too.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from fxprec.programs import packed_weights
from fxprec.programs.packed_weights import PackedWeights, _PackedFunction


class Packing(NamedTuple):
    weight: str
    norm: None = None


FOLDED, OF_SHADOW = Packing("w"), Packing("s")


@pytest.fixture
def function(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A program that says what it ran on: f(weight, x)."""
    monkeypatch.setattr(packed_weights, "_make", lambda _packing, weights: (weights[0].clone(),))
    shadows: Any = SimpleNamespace(refreshes=0)
    made: Any = _PackedFunction.__new__(_PackedFunction)
    made.packings, made._paths, made._inputs, made._of_shadows = (Packing("w"),), ("w",), 1, frozenset()
    made._weights = lambda given: given[:1]
    made._store = PackedWeights(SimpleNamespace(), shadows)  # type: ignore[arg-type]
    made._plain = lambda weight, x: ("plain", weight.clone())
    made._forward = lambda copy, weight, x: ("packed", copy.clone())
    made.forget()
    return made


@pytest.mark.parametrize("size", [1, 3, 90], ids=str)
@pytest.mark.parametrize("offset", [0, 1], ids=["whole words", "half words"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_write_that_no_version_counts_is_packed_anew(function: Any, dtype: torch.dtype, offset: int, size: int):
    weight, x = torch.randn(size + offset).to(dtype)[offset:], torch.ones(1)

    def ran() -> str:
        how, used = function(weight, x)
        assert torch.equal(used, weight)
        return how

    assert [ran() for _ in range(2)] == ["packed"] * 2
    for _ in range(2):
        weight.data.mul_(1.5)
        assert [ran() for _ in range(3)] == ["plain", "packed", "packed"]


def test_weights_that_are_overwritten_at_each_call_are_not_packed(function: Any):
    weight: Tensor = torch.randn(90).bfloat16()
    function(weight, torch.ones(1))
    for _ in range(4):
        weight.data.mul_(1.5)
        how, used = function(weight, torch.ones(1))
        assert how == "plain" and torch.equal(used, weight)


def test_a_refresh_of_shadows_leaves_what_is_made_of_other_weights(function: Any):
    """Such as a norm that was folded into an FP32 weight, which has become low since."""
    store, low, shadow = function._store, torch.randn(90).bfloat16(), torch.randn(90).bfloat16()
    function.packings, function._paths, function._of_shadows = (FOLDED, OF_SHADOW), ("w", "s"), frozenset({OF_SHADOW})
    function._weights, function._inputs = lambda given: given[:2], 2
    function._forward = lambda folded, packed, *given: (folded, packed)
    store.shadows.refreshes = 3
    folded = torch.randn(90).bfloat16()
    store._packed[FOLDED] = packed_weights._CacheEntry((0, *packed_weights._keys([low])), (folded,))
    first, packed = function(low, shadow, torch.ones(1))
    assert first is folded and torch.equal(packed, shadow)
    store.shadows.refreshes += 1
    function._plain = lambda *given: None
    function(low, shadow, torch.ones(1))
    again, anew = function(low, shadow, torch.ones(1))
    assert again is folded and anew is not packed
