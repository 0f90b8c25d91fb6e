"""Updates slice by slice: the same bit for bit, low gradients never all in FP32 at once, and no slice of old memory."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import fxprec
from fxprec.module import conversion_of
from fxprec.optim import slices as module
from fxprec.optim.slices import Slices

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


def slices_of(lists, shadows=list):
    return Slices().of("key", lists, shadows)


def test_gradients_of_the_right_dtype_without_shadows_are_one_slice(limit: int):
    lists = lists_of([(300,), (4, 4)], torch.float32)
    assert [*slices_of(lists)] == [lists]
    assert [*slices_of(lists, lambda: [None, None])] == [lists]


def test_few_elements_are_one_slice_and_their_shadows_somebody_elses(limit: int):
    lists = lists_of([(50,), (4, 4)], torch.float32)
    assert [*slices_of(lists, lambda: pytest.fail("these would have to be written"))] == [lists]


def test_gradients_of_the_right_dtype_are_cut_for_the_shadows(limit: int):
    lists = lists_of([(15, 17), (4,)], torch.float32)
    shadows = [torch.zeros(15, 17, dtype=torch.bfloat16), None]
    seen = []
    for some in slices_of(lists, lambda: shadows):
        seen += some["grads"]
        for param, gradient in zip(some["params"], some["grads"], strict=True):
            param.sub_(gradient)
    assert [gradient.numel() for gradient in seen] == [100, 100, 55, 4]
    assert {gradient.untyped_storage().data_ptr() for gradient in seen} == {g.data_ptr() for g in lists["grads"]}
    assert torch.equal(shadows[0], lists["params"][0].bfloat16())


def test_slices_are_views_that_cover_everything_once(limit: int):
    torch.manual_seed(0)
    lists = lists_of([(8,), (15, 17), (9, 9), (3,), (100,), ()])
    right = [gradient.float() for gradient in lists["grads"]]
    sizes = []
    for some in slices_of(lists):
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
    for some in slices_of(lists, lambda: shadows):
        done.append(sum(bool(part.count_nonzero()) for part in shadows[1].view(-1).split(limit)))
        for param in some["params"]:
            param.fill_(2.0)
    assert done == [0, 1, 2, 3]
    assert all(torch.equal(shadow, torch.full_like(shadow, 2.0)) for shadow in shadows if shadow is not None)


def test_what_is_not_contiguous_is_not_cut(limit: int):
    lists = {name: [tensor.t() for tensor in tensors] for name, tensors in lists_of([(15, 17)]).items()}
    (some,) = slices_of(lists)
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
        assert bool(optimizer._torch.slices._cuts) is (limit == 64)
        store = conversion_of(model).store
        assert all(torch.equal(store.shadow_of(p), p.bfloat16()) for p in model.parameters())
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))


@needs_low_gradients
def test_slices_are_kept_until_a_tensor_is_another(limit: int):
    torch.manual_seed(0)
    slices, lists = Slices(), lists_of([(15, 17), (8,)])

    def update() -> list[Tensor]:
        seen = []
        for some in slices.of("key", lists):
            seen += some["params"]
            for param, gradient in zip(some["params"], some["grads"], strict=True):
                param.copy_(gradient)
        assert all(torch.equal(p, g.float()) for p, g in zip(lists["params"], lists["grads"], strict=True))
        return seen

    first = update()
    lists["grads"] = [torch.randn_like(gradient) for gradient in lists["grads"]]
    assert all(map(lambda a, b: a is b, first, update()))
    lists["params"][0].data = torch.zeros(15, 17)
    second = update()
    assert second[0] is not first[0]
    lists["params"][0].data = lists["params"][0].data.view(17, 15)
    lists["grads"][0] = lists["grads"][0].view(17, 15)
    third = update()
    assert third[0] is not second[0]
    for name in ("params", "grads", "exp_avg"):
        lists[name][0].data = lists[name][0].data[:-1]
    assert sum(param.numel() for param in update()) == 16 * 15 + 8
    lists["exp_avg"][1] = torch.zeros(8)
    fourth = update()
    assert fourth[0] is not third[0]
    lists = {name: [tensors[0][:15, :15]] for name, tensors in lists.items() if name != "step"}
    lists["step"] = [torch.tensor(0.0)]
    for name in ("params", "grads", "exp_avg"):
        lists[name] = [lists[name][0].contiguous()]
    fifth = update()
    for name in ("params", "grads", "exp_avg"):
        lists[name][0].data = lists[name][0].data.t()
    assert update()[0] is not fifth[0]


@pytest.mark.parametrize("make", [fxprec.optim.AdamW, fxprec.optim.SGD], ids=["adamw", "sgd"])
@pytest.mark.parametrize("low_gradients", [False, pytest.param(True, marks=needs_low_gradients)])
def test_kept_slices_do_not_outlive_what_they_were_cut_from(make, low_gradients: bool, limit: int):
    """Of a checkpoint loaded in between, moments are other tensors; of a copied optimizer, everything is."""
    torch.manual_seed(0)
    model, _ = fxprec.convert(nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)))
    options = {"momentum": 0.9} if make is fxprec.optim.SGD else {}
    optimizer = make(model.parameters(), lr=0.1, low_gradients=low_gradients, **options)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.ones(3, 16)).square().sum().backward()
        optimizer.step()

    step()
    assert optimizer._torch.slices._cuts
    weights, states = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    step()
    right = [parameter.detach().clone() for parameter in model.parameters()]
    model.load_state_dict(weights)
    optimizer.load_state_dict(states)
    step()
    assert all(torch.equal(a, b) for a, b in zip(right, model.parameters(), strict=True))
    assert not copy.deepcopy(optimizer)._torch.slices._cuts
