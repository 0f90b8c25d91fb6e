"""Updates slice by slice: the same bit for bit, low gradients never all in FP32 at once, and no slice of old memory."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from torch import Tensor, nn

import fxprec
from fxprec.model.conversion import conversion_of
from fxprec.optim import torch_update as module
from fxprec.optim.torch_update import slices
from fxprec.shadows import ShadowStore

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


def test_gradients_of_the_right_dtype_are_left_alone(limit: int):
    lists = lists_of([(300,), (4, 4)], torch.float32)
    assert [*slices(lists, lambda: pytest.fail("these would have to be written"))] == [lists]


def test_slices_are_views_that_cover_everything_once(limit: int):
    torch.manual_seed(0)
    lists = lists_of([(8,), (15, 17), (9, 9), (3,), (100,), ()])
    right = [gradient.float() for gradient in lists["grads"]]
    sizes = []
    for some in slices(lists):
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
    for some in slices(lists, lambda: shadows):
        done.append(sum(bool(part.count_nonzero()) for part in shadows[1].view(-1).split(limit)))
        for param in some["params"]:
            param.fill_(2.0)
    assert done == [0, 1, 2, 3]
    assert all(torch.equal(shadow, torch.full_like(shadow, 2.0)) for shadow in shadows if shadow is not None)


def test_what_is_not_contiguous_is_not_cut(limit: int):
    lists = {name: [tensor.t() for tensor in tensors] for name, tensors in lists_of([(15, 17)]).items()}
    (some,) = slices(lists)
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


@pytest.mark.parametrize("make", [fxprec.optim.AdamW, fxprec.optim.SGD], ids=["adamw", "sgd"])
@pytest.mark.parametrize("low_gradients", [False, pytest.param(True, marks=needs_low_gradients)])
def test_no_slice_outlives_its_step(make, low_gradients: bool, limit: int):
    """Of a checkpoint loaded in between, moments are other tensors; of a weight that grew, everything is."""
    torch.manual_seed(0)
    model, _ = fxprec.convert(nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)))
    options = {"momentum": 0.9} if make is fxprec.optim.SGD else {}
    optimizer = make(model.parameters(), lr=0.1, low_gradients=low_gradients, **options)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.ones(3, 16)).square().sum().backward()
        optimizer.step()

    step()
    weights, states = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    step()
    right = [parameter.detach().clone() for parameter in model.parameters()]
    model.load_state_dict(weights)
    optimizer.load_state_dict(states)
    held = [weakref.ref(value) for state in optimizer.state.values() for value in state.values()]
    step()
    assert all(torch.equal(a, b) for a, b in zip(right, model.parameters(), strict=True))
    store = conversion_of(model).store
    shadow = weakref.ref(store.shadow_of(model[0].weight))
    store.clear()
    optimizer.load_state_dict(states)
    gc.collect()
    assert shadow() is None and all(value() is None for value in held)


@pytest.mark.parametrize("make", [fxprec.optim.AdamW, fxprec.optim.SGD], ids=["adamw", "sgd"])
def test_a_parameter_that_took_over_the_memory_of_another_is_the_one_that_is_updated(make, limit: int):
    weight, bias = nn.Parameter(torch.randn(32, 32)), nn.Parameter(torch.randn(32))
    optimizer = make([weight, bias], lr=0.1)
    store = ShadowStore(torch.bfloat16)
    for _ in range(2):
        store.begin()
        store.read([weight])
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.grad = torch.ones_like(parameter)
        new = optimizer.param_groups[0]["params"][1]
        before = new.detach().clone()
        optimizer.step()
        assert not torch.equal(new, before)
        taken = nn.Parameter(bias.data)
        bias.data = torch.zeros(32)
        optimizer.param_groups[0]["params"][1] = taken


@needs_low_gradients
def test_gradients_of_several_dtypes_in_one_slice(limit: int):
    torch.manual_seed(0)
    lists = lists_of([(3, 4), (5,), (15, 17)])
    lists["grads"][1] = lists["grads"][1].double().float()
    right = [gradient.float() for gradient in lists["grads"]]
    seen = [gradient.clone() for some in slices(lists) for gradient in some["grads"]]
    assert {gradient.dtype for gradient in seen} == {torch.float32}
    assert torch.equal(torch.cat([g.flatten() for g in seen[:3]]), right[2].flatten())
    assert torch.equal(seen[3], right[0]) and torch.equal(seen[4], right[1])
