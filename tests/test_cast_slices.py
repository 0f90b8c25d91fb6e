"""Low gradients cast slice by slice: the same update bit for bit, and never all of them in FP32 at once."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import fxprec
from fxprec.module import conversion_of
from fxprec.optim import cast_slices as module
from fxprec.optim.cast_slices import cast_slices

needs_low_gradients = pytest.mark.skipif(not hasattr(Tensor, "grad_dtype"), reason="wants Tensor.grad_dtype")


@pytest.fixture
def limit(monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(module, "_AT_ONCE", {"cpu": 100})
    return 100


def lists_of(shapes: list[tuple[int, ...]], gradients: torch.dtype = torch.bfloat16) -> dict[str, list[Tensor]]:
    params = [torch.randn(shape) for shape in shapes]
    return {
        "params": params,
        "grads": [torch.randn(shape).to(gradients) for shape in shapes],
        "exp_avg": [torch.zeros(shape) for shape in shapes],
        "step": [torch.tensor(float(i)) for i in range(len(shapes))],
    }


def test_gradients_of_the_right_dtype_are_left_alone():
    lists = lists_of([(300,), (4, 4)], torch.float32)
    assert [*cast_slices(lists)] == [lists]


def test_slices_are_views_that_cover_everything_once(limit: int):
    torch.manual_seed(0)
    lists = lists_of([(8,), (15, 17), (9, 9), (3,), (100,), ()])
    right = [gradient.float() for gradient in lists["grads"]]
    sizes = []
    for some in cast_slices(lists):
        sizes.append([param.numel() for param in some["params"]])
        assert sum(sizes[-1]) <= limit
        for param, gradient, step in zip(some["params"], some["grads"], some["step"], strict=True):
            assert gradient.dtype is torch.float32 and step.dim() == 0
            param.copy_(gradient)
            step.add_(10)
    assert sizes == [[100], [100], [55], [8, 81, 3], [100], [1]]
    assert all(torch.equal(param, gradient) for param, gradient in zip(lists["params"], right, strict=True))
    assert [step.item() for step in lists["step"]] == [10, 31, 12, 13, 14, 15]  # that of three slices is one


def test_shadows_are_written_slice_by_slice(limit: int):
    lists = lists_of([(8,), (15, 17), (4,), (2, 3)])
    shadows = [torch.zeros(8), torch.zeros(15, 17), None, torch.zeros(3, 2).t()]
    done = []
    for some in cast_slices(lists, lambda: shadows):
        done.append(sum(bool(part.count_nonzero()) for part in shadows[1].view(-1).split(limit)))
        for param in some["params"]:
            param.fill_(2.0)
    assert done == [0, 1, 2, 3]
    assert all(torch.equal(shadow, torch.full_like(shadow, 2.0)) for shadow in shadows if shadow is not None)


def test_what_is_not_contiguous_is_not_cut(limit: int):
    lists = {name: [tensor.t() for tensor in tensors] for name, tensors in lists_of([(15, 17)]).items()}
    (some,) = cast_slices(lists)
    assert some["params"] == lists["params"] and some["grads"][0].stride() == lists["grads"][0].stride()
    assert torch.equal(some["grads"][0], lists["grads"][0].float())


@needs_low_gradients
@pytest.mark.parametrize("make", [fxprec.optim.AdamW, fxprec.optim.SGD], ids=["adamw", "sgd"])
def test_an_update_by_slices_is_the_same_bit_for_bit(make, monkeypatch: pytest.MonkeyPatch):
    weights = []
    for limit in (1 << 20, 64):  # a multiple of the vectors of the kernel, as the real one is
        monkeypatch.setattr(module, "_AT_ONCE", {"cpu": limit})
        torch.manual_seed(0)
        model, _ = fxprec.convert(nn.Sequential(nn.Linear(4, 16), nn.Linear(16, 16), nn.Linear(16, 2)))
        optimizer = make(model.parameters(), lr=0.1, low_gradients=True)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(3, 4)).square().sum().backward()
            optimizer.step()
        assert {parameter.grad.dtype for parameter in model.parameters()} == {torch.bfloat16}
        weights.append([*model.parameters()])
        store = conversion_of(model).store
        assert all(torch.equal(store.shadow_of(p), p.bfloat16()) for p in model.parameters())
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))
