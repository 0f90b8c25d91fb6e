"""A graph module is called as the model is called, gives what the model gives, and fits the model's modes."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from collections import OrderedDict
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import fxprec
from graph_ways import EXACT

X, MASK = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(1))


@dataclasses.dataclass
class Out:
    hidden: Any
    more: tuple[Any, ...] = ()


class Pair(NamedTuple):
    first: Any
    second: Any


class Output(OrderedDict[str, Any]):
    """As those of transformers: a registered container, with attributes."""

    def __init__(self, **parts: Any) -> None:
        super().__init__(parts)
        for key, value in parts.items():
            setattr(self, key, value)


pytree.register_pytree_node(
    Output,
    lambda value: (list(value.values()), list(value)),
    lambda values, keys: Output(**dict(zip(keys, values, strict=True))),
    serialized_type_name=f"{__name__}.Output",
)

FORMS: dict[str, Any] = {
    "tensor": lambda h, x: h,
    "tuple": lambda h, x: (h, h + 1),
    "tuple of one": lambda h, x: (h,),
    "list": lambda h, x: [h, x],
    "dict": lambda h, x: {"h": h, "all": [h * 2, x], "none": None, "name": "out", "k": 3},
    "dataclass": lambda h, x: Out(h, (h + 1, 2.0)),
    "named tuple": lambda h, x: Pair(h, {"x": x}),
    "ordered dict": lambda h, x: OrderedDict(h=h, x=[x]),
    "output": lambda h, x: Output(logits=h, hidden=(h * 2, x)),
    "twice": lambda h, x: (h, [h]),
}


class Model(nn.Module):
    def __init__(self, form: str = "tensor") -> None:
        super().__init__()
        self.fc, self.made = nn.Linear(8, 8), FORMS[form]

    def forward(self, batch, scale=2.0, mask=None, *more, flag=False, **named):
        x = batch["x"] if isinstance(batch, dict) else batch.first if isinstance(batch, Pair) else batch
        h = self.fc(x) * scale
        for other in (mask, *more, *named.values()):
            if other is not None:
                h = h - other
        return self.made(F.relu(h) if flag else h, x)


class Plain(nn.Module):
    """Without stars, so that static capture can take it."""

    def __init__(self, form: str = "tensor") -> None:
        super().__init__()
        self.fc, self.made = nn.Linear(8, 8), FORMS[form]

    def forward(self, x, scale=2.0, mask=None, flag=False):
        h = self.fc(x) * scale
        if mask is not None:
            h = h - mask
        return self.made(F.relu(h) if flag else h, x)


CALLS: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "one": ((X,), {}),
    "by name": ((), {"batch": X}),
    "a number": ((X, 3.0), {}),
    "an option": ((X,), {"mask": MASK}),
    "all": ((X, 3.0, MASK, MASK + 1), {"flag": True}),
    "other names": ((X,), {"flag": True, "bias": MASK}),
    "a dict": (({"x": X, "y": [1, None]},), {}),
    "a named tuple": ((Pair(X, MASK), 2.0, MASK), {}),
    "one tensor twice": ((X, 2.0, X), {}),
}


def converted(model: nn.Module, capture: str, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    return fxprec.convert(model, dtype=torch.bfloat16, scaler=False, capture=capture, **options).module


def assert_same(found: Any, expected: Any) -> None:
    assert type(found) is type(expected)
    if isinstance(expected, Tensor):
        assert found.dtype == expected.dtype and torch.equal(found, expected)
    elif isinstance(expected, dict):
        assert [*found] == [*expected]
        for key in expected:
            assert_same(found[key], expected[key])
    elif isinstance(expected, tuple | list):
        for a, b in zip(found, expected, strict=True):
            assert_same(a, b)
    elif dataclasses.is_dataclass(expected):
        assert_same(vars(found), vars(expected))
    else:
        assert found == expected


@pytest.mark.parametrize("call", CALLS)
def test_it_is_called_as_the_model_is(call):
    args, kwargs = CALLS[call]
    model = converted(Model(), "dynamo")
    expected = model(*args, **kwargs)
    assert_same(fxprec.graph_module(model)(*args, **kwargs), expected)


@pytest.mark.parametrize("call", ["one", "a number", "an option", "flag"])
def test_static_graphs_too(call):
    args, kwargs = CALLS.get(call, ((X, 2.0, None, True), {}))
    model = converted(Plain(), "symbolic")
    expected = model(*args, **kwargs)
    gm = fxprec.graph_module(model)
    assert_same(gm(*args, **kwargs), expected)
    assert_same(gm(**dict(zip(("x", "scale", "mask", "flag"), args, strict=False)), **kwargs), expected)


@pytest.mark.parametrize("capture", ["auto", "dynamo"])
@pytest.mark.parametrize("form", FORMS)
def test_it_gives_what_the_model_gives(form, capture):
    model = converted(Plain(form), capture)
    expected = model(X, mask=MASK)
    gm = fxprec.graph_module(model)
    assert_same(gm(X, mask=MASK), expected)
    for way in ("deepcopy", "symbolic_trace", "copy"):
        found = EXACT[way](gm, X, 2.0, MASK)(X, 2.0, MASK)
        assert_same(found, expected)


@pytest.mark.parametrize("capture", ["auto", "dynamo"])
def test_the_nodes_of_the_form_have_a_precision_too(capture):
    """Reports, and whoever reads the annotations, find one on each node but the last."""
    model = converted(Plain("dataclass"), capture)
    model(X, mask=MASK)
    gm = fxprec.graph_module(model)
    assert all("precision" in node.meta for node in gm.graph.nodes if node.op != "output")
    assert str(fxprec.report(model).nodes) == str(fxprec.report(model).nodes)


@pytest.mark.parametrize("level", ["O2", "O3"])
@pytest.mark.parametrize("form", ["dataclass", "output", "tuple"])
def test_results_in_containers_have_the_original_dtypes(form, level):
    model = converted(Plain(form), "dynamo", level=level)
    expected = model(X)
    assert_same(fxprec.graph_module(model)(X), expected)


@pytest.mark.parametrize(
    ("first", "then", "match"),
    [
        (((X,), {}), ((X,), {"flag": True}), r"flag: this graph was captured with False.* called with True"),
        (((X,), {}), ((X, 2.0, MASK), {}), r"mask: this graph was captured with None.* called with float32\[4, 8\]"),
        (((X, 2), {}), ((X, 2.0), {}), "scale: this graph was captured with 2, .* called with 2.0"),
        (((X, 2.0, MASK), {}), ((X,), {}), "missing|mask: .* captured with .*, .* called with nothing"),
    ],
)
@pytest.mark.parametrize("capture", ["symbolic", "dynamo"])
def test_what_is_built_in_is_checked(first, then, match, capture):
    model = converted(Plain(), capture)
    model(*first[0], **first[1])
    gm = fxprec.graph_module(model)
    with pytest.raises((fxprec.OtherCallError, TypeError), match=match):
        gm(*then[0], **then[1])


@pytest.mark.parametrize(
    ("first", "then", "match"),
    [
        ((X,), (X[:2],), r"batch: .* captured with float32\[4, 8\], .* called with float32\[2, 8\]"),
        ((X,), (X.double(),), r"batch: .* captured with float32\[4, 8\], .* called with float64\[4, 8\]"),
        (({"x": X},), ({"x": X, "y": 1},), r"batch: .* captured with an object with \['x'\]"),
        (({"x": X, "y": 1},), ({"x": X, "y": 2},), r"batch\['y'\]: .* captured with 1, .* called with 2"),
        ((X, 2.0, X), (X, 2.0, X.clone()), "mask: .* captured with the very tensor that batch is"),
    ],
)
def test_what_dynamo_built_in_is_checked(first, then, match):
    model = converted(Model(), "dynamo")
    model(*first)
    with pytest.raises(fxprec.OtherCallError, match=match):
        fxprec.graph_module(model)(*then)


def test_numbers_and_sizes_that_may_change_are_inputs():
    model = converted(Model(), "dynamo")
    for rows, scale in ((4, 2.0), (5, 3.0), (6, 4)):
        model(torch.randn(rows, 8), scale)
    x = torch.randn(7, 8)
    model(x, 5.5)
    assert_same(fxprec.graph_module(model)(x, 5.5), model(x, 5.5))
    assert_same(fxprec.graph_module(model)(x, 6.5), model(x, 6.5))


class Scaled(nn.Module):
    """Numbers of the model, which dynamo takes for inputs once another model of the class has others."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.fc, self.drop, self.p, self.bias = nn.Linear(8, 8), nn.Dropout(p), p, torch.randn(8)

    def forward(self, x):
        return self.drop(self.fc(x)) * self.p + self.bias


def test_numbers_of_the_model_are_built_in():
    for p in (0.25, 0.5, 0.75):
        model = converted(Scaled(p).eval(), "dynamo")
        expected, gm = model(X), fxprec.graph_module(model)
        assert_same(gm(X), expected)
        assert_same(torch.export.export(gm, (X,)).module()(X), expected)  # no number is asked of a tensor
    for name, value in (("p", 0.5), ("bias", torch.zeros(8))):
        before = getattr(model, name)
        setattr(model, name, value)
        with pytest.raises(fxprec.NotCapturedError, match=f"^{name} of Scaled is another than at the first call"):
            fxprec.graph_module(model)
        setattr(model, name, before)
        assert fxprec.graph_module(model) is gm


def test_forms_keep_no_model_alive():
    class Giving(Plain):
        def forward(self, x):
            return self.fc(x) + self.kept, self.fc.weight

    model = Giving()
    model.kept = torch.randn(8)
    model = converted(model, "dynamo")
    expected = model(X)
    assert_same(fxprec.graph_module(model)(X), expected)
    del expected
    dead = [weakref.ref(each) for each in (model, model.fc.weight, model.kept)]
    del model
    gc.collect()
    assert [each() for each in dead] == [None] * 3


class Kept:
    """No container that anybody knows."""

    def __init__(self, h: Tensor) -> None:
        self.h = h


def test_a_form_that_cannot_be_made_is_told():
    model = converted(Plain(), "dynamo")
    model.made = lambda h, x: Kept(h)
    expected = model(X).h
    with pytest.warns(fxprec.ServiceWarning, match=r"gives a tuple of tensors, not what .* an object \(Kept\)"):
        gm = fxprec.graph_module(model)
    assert_same(gm(X), (expected,))


class Moody(nn.Module):
    """Of modes: batch norm and dropout, which a user may set one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.bn, self.drop = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5)

    def forward(self, x):
        return self.drop(self.bn(self.fc(x)))


def given(function: Any, model: nn.Module) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        model.bn.running_mean.zero_()
        torch.manual_seed(3)
        return function(X), model.bn.running_mean.clone()


@pytest.mark.parametrize("capture", ["symbolic", "dynamo"])
def test_it_fits_the_modes_of_now(capture):
    model = converted(Moody(), capture)
    model(X)
    for modes in ((True, True), (False, False), (True, False), (False, True), (True, True), (False, False)):
        model.train(modes[0])
        model.bn.train(modes[1])
        if capture == "dynamo":
            model(X)
        expected = given(model, model)
        assert_same(given(fxprec.graph_module(model), model), expected)


def test_a_mode_without_a_graph_of_dynamo_says_so():
    model = converted(Moody(), "dynamo")
    model(X)
    fxprec.graph_module(model)
    model.eval()
    with pytest.raises(fxprec.NotCapturedError, match=r"Moody is for the modes .* in now \(eval\): call it once so"):
        fxprec.graph_module(model)
    model(X)
    assert_same(given(fxprec.graph_module(model), model), given(model, model))
    model.train()
    assert_same(given(fxprec.graph_module(model), model), given(model, model))


def test_one_graph_of_dynamo_may_serve_several_modes():
    model = converted(nn.Sequential(nn.Linear(8, 8), nn.GELU()), "dynamo")
    expected = model(X)
    for change in (model.eval, model[0].train):
        change()
        with pytest.raises(fxprec.NotCapturedError):
            fxprec.graph_module(model)
        model(X)
        assert_same(fxprec.graph_module(model)(X), expected)
    assert len(fxprec.graphs(model)) == 1


@pytest.mark.parametrize("capture", ["symbolic", "dynamo"])
def test_a_frozen_model_exports_as_the_readme_says(capture):
    model = converted(Moody(), capture)
    model(X)
    if capture == "dynamo":
        model.eval()(X)
    fxprec.freeze(model)
    program = torch.export.export(fxprec.graph_module(model), (X,))
    assert_same(program.module()(X), model(X))
    assert all(node.args[2] is False for node in program.graph.nodes if "dropout" in str(node.target))


class Broken(nn.Module):
    def __init__(self, where: str) -> None:
        super().__init__()
        self.a, self.b, self.where = nn.Linear(8, 8), nn.Linear(8, 8), where

    def forward(self, x):
        h = self.a(x)
        if self.where == "value":
            if h.sum() > 1e9:
                return h
        elif self.where == "hidden":  # the second piece gives all there is
            torch._dynamo.graph_break()
            return self.b(x)
        return self.b(h)


@pytest.mark.parametrize("where", ["value", "hidden"])
@pytest.mark.parametrize("mode", [True, False])
def test_pieces_are_refused(where, mode):
    model = converted(Broken(where).train(mode), "auto" if where == "value" else "dynamo")
    model(X)
    with pytest.raises(fxprec.SeveralGraphsError, match=r"captured in pieces.*graph break.*fxprec\.graphs\(model\)"):
        fxprec.graph_module(model)
    assert len(fxprec.graphs(model)) == 2


def test_a_break_that_is_gone_is_forgotten():
    model = converted(Broken("value"), "dynamo")
    model(X)
    model.where = "nowhere"
    expected = model(X)
    assert_same(fxprec.graph_module(model)(X), expected)


@pytest.mark.parametrize("capture", ["auto", "dynamo"])
def test_other_methods_likewise(capture):
    class Coder(Moody):
        def encode(self, batch, scale=1.0, **more):
            h = self.fc(batch["x"]) * scale
            return {"h": self.drop(h), "n": len(more)}

    model = converted(Coder(), capture, methods=("encode",))
    for mode in (True, False):
        model.train(mode)
        torch.manual_seed(3)
        expected = model.encode({"x": X}, 3.0, other=MASK)
        gm = fxprec.graph_module(model, method="encode")
        torch.manual_seed(3)
        assert_same(gm({"x": X}, 3.0, other=MASK), expected)


def test_weights_that_were_replaced_are_those_of_now():
    model = converted(Plain(), "symbolic")
    model(X)
    before = fxprec.graph_module(model)(X)
    model.fc.weight = nn.Parameter(torch.randn(8, 8))
    expected = model(X)
    assert not torch.equal(before, expected)
    assert_same(fxprec.graph_module(model)(X), expected)


def test_weights_of_another_dtype():
    model = converted(Plain(), "symbolic")
    model(X)
    fxprec.graph_module(model)
    model.double()
    gm = fxprec.graph_module(model)
    x = X.double()
    assert_same(gm(x), model(x))
    model.bfloat16()
    with pytest.raises(fxprec.NotCapturedError):
        fxprec.graph_module(model)
