"""Methods that were not named: found by what their code calls, and listed in the report."""

from __future__ import annotations

import json

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxprec
from fxprec.inspection.unnamed import unnamed_methods


class Part(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(4, 4)

    def forward(self, x):
        return self.helper(x)

    def helper(self, x):
        return self.proj(x)

    def alone(self, x):
        return self.proj(x) + 1

    def width(self):
        return self.proj.out_features

    def replace(self, proj):
        self.proj = proj


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.part, self.head = Part(), nn.Linear(4, 4)
        self.layers = nn.ModuleList([Part() for _ in range(3)])
        self.table = nn.ParameterDict({"a": nn.Parameter(torch.ones(4))})
        self.config = {"a": 1}

    def forward(self, x):
        return self.head(self.features(x))

    def features(self, x):
        return self.part(x)

    def pooled(self, x):
        return self.features(x).mean(-1)

    def loop(self, x):
        for layer in self.layers:
            x = layer(x)
        return x

    def comprehension(self, x):
        return [layer(x) for layer in self.layers], (lambda: self.head(x))()

    def first(self, x):
        return self.layers[0](x)

    def unpacked(self, *args):
        return self.head(*args)

    def by_weight(self, x):
        return F.linear(x, self.head.weight)

    def of_part(self, x):
        return self.part.alone(x)

    def explicit(self, x):
        return self.part.forward(x)

    @torch.no_grad()
    def decorated(self, x):
        return self.head(x)

    def deep(self, x):
        return self.part.proj(x)

    # -- what computes nothing by itself

    def whole(self, x):
        return self(x)

    def through_forward(self, x):
        return self.forward(x)

    def head_of(self):
        return self.head

    def weights(self):
        return list(self.head.parameters()), self.part.width(), self.config["a"]

    def set_head(self, head):
        self.head = head
        self.part.replace(head)

    def is_tied(self):
        return self.head is self.part

    def _private(self, x):
        return self.head(x)

    def reset(self):
        nn.init.zeros_(self.head.weight)

    def tie(self):
        self.head.weight = self.part.proj.weight

    def sizes(self):
        return self.head.weight.numel(), self.head.weight is self.part.proj.weight

    def early(self, x):
        if x is None:
            return None
        return x.detach()

    def init_weights(self):
        nn.init.zeros_(self.part.proj.weight)
        self.part(torch.zeros(1, 4))

    def fit(self, x):
        self.part(x).sum().backward()

    @staticmethod
    def static(x):
        return x

    @property
    def bias(self):
        return self.head.bias


@pytest.mark.parametrize(
    ("method", "calls"),
    [
        ("features", ("part",)),
        ("pooled", ("part",)),
        ("loop", ("layers",)),
        ("comprehension", ("layers", "head")),
        ("first", ("layers",)),
        ("unpacked", ("head",)),
        ("by_weight", ("head",)),
        ("of_part", ("part.alone",)),
        ("explicit", ("part",)),
        ("decorated", ("head",)),
        ("deep", ("part.proj",)),
        ("fit", ("part",)),
        ("part.alone", ("proj",)),
    ],
)
def test_methods_that_call_submodules(method, calls):
    found = {each.method: each.calls for each in unnamed_methods(Model(), ())}
    assert sorted(found[method]) == sorted(calls)


@pytest.mark.parametrize(
    "method",
    ["whole", "through_forward", "head_of", "weights", "set_head", "is_tied", "_private", "reset", "tie", "sizes",
     "early", "static", "bias", "init_weights",
     "part.helper", "part.width", "part.replace", "forward"],
)  # fmt: skip
def test_methods_that_do_not(method):
    assert method not in [each.method for each in unnamed_methods(Model(), ())]


def test_named_methods_are_left_out_and_so_is_what_they_do_for_others():
    found = {each.method: each.calls for each in unnamed_methods(Model(), ("features", "part.alone"))}
    assert not {"features", "pooled", "part.alone", "of_part"} & found.keys()
    found = {each.method: each.calls for each in unnamed_methods(Model(), ("part.forward",))}
    assert "features" not in found and "explicit" not in found and found["of_part"] == ("part.alone",)


def test_modules_of_one_class_are_one_line():
    (line,) = [str(each) for each in unnamed_methods(Model(), ()) if each.method == "part.alone"]
    assert line == (
        "part.alone calls proj (so do 3 modules like it): by itself in FP32, "
        "unless convert(model, methods=('part.alone',))"
    )


def test_the_report_lists_them_and_names_the_methods_of_the_graphs():
    model, _ = fxprec.convert(Model(), dtype=torch.bfloat16, methods=("features", "part.alone"))
    report = fxprec.report(model)
    assert report.headline.methods == ("features", "part.alone")
    assert [graph.method for graph in report.graphs] == ["forward", "features", "part.alone"]
    text = str(report)
    assert "methods      forward, features, part.alone" in text and "graph 2 of 3: features(x)" in str(report.nodes)
    assert "not named    by_weight calls head: by itself in FP32, unless convert(model, methods=('by_weight',))" in text
    assert "pooled" not in text
    plain = json.loads(json.dumps(report.to_dict()))
    assert plain["graphs"][1]["method"] == "features" and any("loop" in line for line in plain["headline"]["not_named"])
    assert "part.proj in graph 3 of 3 (part.alone): 1 node" in fxprec.explain(model, "part.proj")


def test_a_model_without_such_methods_has_no_such_lines():
    report = fxprec.report(fxprec.convert(nn.Sequential(Part()), dtype=torch.bfloat16).module)
    assert "part" not in str(report) and "\nmethods " not in str(report) and "graph 1 of 1: (" in str(report.nodes)


class TimmLike(nn.Module):
    """Has methods of the kinds that image models have."""

    def __init__(self):
        super().__init__()
        self.stem, self.norm, self.act = nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.ReLU()
        self.blocks = nn.Sequential(*[Part() for _ in range(3)])
        self.table, self.head = nn.Embedding(4, 4), nn.Linear(4, 4)
        self.mixing = nn.Parameter(torch.ones(4, 4))

    def forward(self, x):
        return self.head(x)

    # -- what runs products

    def sliced(self, x):
        blocks = self.blocks[:2] if x is None else self.blocks
        for number, block in enumerate(blocks):
            x = block(x) * number
        return x

    def by_hand(self, x):
        stages = [self.stem, self.norm]
        for stage in stages:
            x = stage(x)
        return x

    def handed_on(self, x):
        return torch.utils.checkpoint.checkpoint(self.head, x, use_reentrant=False)

    def handed_on_call(self, x):
        return torch.utils.checkpoint.checkpoint(self.head.__call__, x, use_reentrant=False)

    def transposed(self, x):
        weight = self.head.weight.t()
        return x @ weight

    def of_an_element(self, x):
        for block in self.blocks:
            x = block.helper(x)
        return x

    def by_einsum(self, x):
        return torch.einsum("ij,kj->ik", x, self.head.weight)

    def in_a_comprehension(self, x):
        return [block.proj(x) for block in reversed(self.blocks)]

    # -- what touches weights only, or has none that products read

    def zero_init_last(self):
        if getattr(self.norm, "weight", None) is not None:
            nn.init.zeros_(self.norm.weight)
        return self.norm

    def prune_intermediate_layers(self, indices=1, prune_head=True):
        taken = list(range(len(self.blocks)))[-indices:]
        self.blocks = self.blocks[: max(taken) + 1]
        if prune_head:
            self.replace_head(0)
        return taken

    def replace_head(self, classes):
        self.head = nn.Linear(self.head.in_features, classes) if classes else nn.Identity()

    def as_sequential(self):
        layers = [self.stem, self.norm]
        layers.extend(self.blocks)
        layers.append(self.head)
        return nn.Sequential(*layers)

    def get_head(self, number):
        return self.head, self.blocks[number]

    def group_matcher(self, coarse):
        return [len(self.blocks), [name for name, _ in self.blocks.named_children()], coarse]

    def fuse(self):
        weight = self.norm.weight.sqrt()
        joined = nn.Conv2d(self.stem.in_channels, self.stem.out_channels, 1)
        joined.weight.data.copy_(self.stem.weight * weight[:, None, None, None])
        joined.bias.data.copy_(self.head.weight @ self.mixing)
        return joined

    def normed(self, x):
        return self.act(self.norm(x))

    def looked_up(self, ids):
        return self.table(ids)

    def penalty(self, scale):
        return scale * (self.head.weight**2).sum() + self.head.weight.abs().max()

    def copied(self, model):
        model.head.load_state_dict(self.head.state_dict())
        return model

    def counted(self, kind):
        return sum(isinstance(block, kind) for block in self.blocks)


@pytest.mark.parametrize(
    ("method", "calls"),
    [
        ("sliced", ("blocks",)),
        ("by_hand", ("stem",)),
        ("handed_on", ("head",)),
        ("handed_on_call", ("head",)),
        ("transposed", ("head",)),
        ("of_an_element", ("blocks",)),
        ("by_einsum", ("head",)),
        ("in_a_comprehension", ("blocks",)),
    ],
)
def test_methods_that_run_products(method, calls):
    found = {each.method: each.calls for each in unnamed_methods(TimmLike(), ())}
    assert found[method] == calls


@pytest.mark.parametrize(
    "method",
    ["zero_init_last", "prune_intermediate_layers", "replace_head", "as_sequential", "get_head", "group_matcher",
     "fuse", "normed", "looked_up", "penalty", "copied", "counted"],
)  # fmt: skip
def test_methods_that_touch_weights_only(method):
    assert method not in [each.method for each in unnamed_methods(TimmLike(), ())]


def test_methods_without_a_source_are_not_listed():
    names = {"nn": nn, "__name__": "typed"}
    exec(
        "class Typed(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.head = nn.Linear(4, 4)\n"
        "    def forward(self, x): return self.head(x)\n"
        "    def features(self, x): return self.head(x)\n",
        names,
    )
    assert unnamed_methods(names["Typed"](), ()) == []


class Twice(nn.Module):
    """Holds a module that holds it: what one of them calls leads back to the other."""

    def __init__(self):
        super().__init__()
        self.head, self.child = nn.Linear(4, 4), None

    def forward(self, x):
        return self.head(x)

    def around(self, x, number):
        return self.child.around(x, number - 1) if number else self.head(x)


def test_methods_that_call_each_other_in_a_ring():
    model = Twice()
    model.child = Twice()
    model.child._modules["child"] = model
    assert unnamed_methods(model, ())[0].method == "around"


@pytest.mark.parametrize(
    "how",
    [
        {"level": "O0"},
        {"level": "O3"},
        {"policy": fxprec.Policy.preset("O1").override(modules={"part": torch.float32, "head": "full"})},
    ],
)
def test_what_is_meant_to_be_as_it_is_is_not_listed(how):
    """At O0 everything is FP32, at O3 the weights themselves are low, and a policy may want a part in FP32."""
    model = fxprec.convert(Model(), dtype=torch.bfloat16, **how).module
    found = {line.split()[0] for line in fxprec.report(model).headline.not_named}
    assert not {"features", "by_weight", "deep", "unpacked"} & found
    assert "features" in str(fxprec.report(fxprec.convert(Model(), dtype=torch.bfloat16).module).headline.not_named)


class Walking(nn.Module):
    """A loop in which a name stands for what hangs below it: the chain has no end."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.child = None

    def forward(self, x):
        return self.first(x)

    def last(self, x):
        each = self.first
        while each.child is not None:
            each = each.child.other if x is None else each.child
        return each(x)


def test_a_chain_without_an_end_is_followed_for_a_while():
    assert [str(method) for method in unnamed_methods(Walking(), ())]
