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
