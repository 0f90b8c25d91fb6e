"""Example inputs are the user's: whatever a forward does to its inputs, convert does not do it to them."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass, field

import pytest
import torch
from torch import nn

import fxprec
from fxprec.capture.untouched import copied_inputs

LOW = torch.bfloat16


class Net(nn.Module):
    def __init__(self, run):
        super().__init__()
        self.l, self.run = nn.Linear(8, 8), run
        self.register_buffer("b", torch.ones(8))

    def forward(self, *args, **kwargs):
        return type(self).step(self, *args, **kwargs)


def net(step):
    return type("Written", (Net,), {"step": staticmethod(step), "forward": step})(None)


@dataclass
class Cache:
    seen: list[torch.Tensor] = field(default_factory=list)
    count: int = 0


def in_place(self, x):
    return self.l(x.mul_(2))


def pops(self, batch):
    return self.l(batch.pop("x").add_(1))


def appends(self, x, xs):
    xs.append(x)
    xs[0].zero_()
    return self.l(sum(xs))


def fills(self, x, cache):
    cache.seen.append(x)
    cache.count += 1
    cache.seen[0].zero_()
    return self.l(x)


def resizes(self, x):
    y = self.l(x)
    x.detach().resize_(0)
    return y


CASES = {
    "in_place": (in_place, lambda: (torch.ones(4, 8),)),
    "without_contiguity": (in_place, lambda: (torch.ones(8, 4).t(),)),
    "part_of_more": (in_place, lambda: (torch.ones(100, 8)[3:7],)),
    "pops": (pops, lambda: ({"x": torch.ones(4, 8)},)),
    "pops_ordered": (pops, lambda: (OrderedDict(x=torch.ones(4, 8)),)),
    "appends": (appends, lambda: (torch.ones(4, 8), [torch.ones(4, 8)])),
    "fills": (fills, lambda: (torch.ones(4, 8), Cache([torch.ones(4, 8)]))),
    "history": (in_place, lambda: (torch.ones(4, 8, requires_grad=True) * 1,)),
}


def described(value):
    if isinstance(value, torch.Tensor):
        return value.tolist(), value._version, value.grad_fn, value.stride()
    if isinstance(value, Cache):
        return described(vars(value))
    if isinstance(value, dict):
        return [(key, described(each)) for key, each in value.items()]
    return [*map(described, value)] if isinstance(value, list | tuple) else value


@pytest.mark.parametrize("capture", ["auto", "dynamo"])
@pytest.mark.parametrize("case", CASES)
def test_convert_does_not_write_to_them(case, capture):
    torch._dynamo.reset()
    step, make = CASES[case]
    given, twin = make(), make()
    before = described(given)
    model = fxprec.convert(net(step), given, dtype=LOW, capture=capture).module
    assert described(given) == before
    graphs = fxprec.report(model).headline.captures
    model(*twin)
    assert fxprec.report(model).headline.captures == graphs > 0, "the graph serves the call it was made for"
    assert described(twin) != before


def test_by_name_and_of_lazy_modules():
    model = net(lambda self, x: self.l(x.mul_(2)))
    model.l = nn.LazyLinear(8)
    x = torch.ones(4, 8)
    fxprec.convert(model, {"x": x}, dtype=LOW)
    assert torch.equal(x, torch.ones(4, 8))


def test_copies_are_as_the_inputs():
    model = net(in_place)
    base = torch.arange(24.0)
    lock = threading.Lock()
    inputs = (
        base, base[:12], base.view(6, 4).t(), torch.ones(1, 8).expand(4, 8), torch.ones(3, requires_grad=True) * 2,
        nn.Parameter(torch.ones(2)), model.b, model.l.weight, torch.eye(3).to_sparse(), torch.ones(()), [lock],
        torch.ones(2, dtype=torch.complex64).conj(), model,
    )  # fmt: skip
    torch._dynamo.mark_dynamic(base, 0)
    args, kwargs = copied_inputs(model, inputs, {"again": base})
    for given, made in zip(inputs, args, strict=True):
        if isinstance(given, torch.Tensor):
            facts = [(t.shape, t.dtype, t.layout, t.requires_grad, type(t), t.is_leaf) for t in (given, made)]
            assert facts[0] == facts[1] and torch.equal(given.to_dense(), made.to_dense())
            assert given.layout is torch.sparse_coo or given.stride() == made.stride()
    assert kwargs["again"] is args[0] and args[0] is not base and args[0]._dynamo_dynamic_indices == {0}
    assert args[1].data_ptr() == args[2].data_ptr() == args[0].data_ptr() != base.data_ptr()
    assert args[3].untyped_storage().nbytes() == 32
    assert all(args[i] is inputs[i] for i in (6, 7, 10, 12)), "the model's own, and what cannot be copied"
    (small,), _ = copied_inputs(model, (torch.zeros(1000)[:2],), {})
    assert small.untyped_storage().nbytes() == 8, "a view is not copied with all that is around it"


def test_in_inference_mode():
    with torch.inference_mode():
        x = torch.ones(4, 8)
        model = fxprec.convert(net(in_place), (x,), dtype=LOW).module
    assert torch.equal(x, torch.ones(4, 8))
    fxprec.convert(net(in_place), (x,), dtype=LOW)
    assert torch.equal(x, torch.ones(4, 8)) and model(torch.ones(4, 8)).shape == (4, 8)
