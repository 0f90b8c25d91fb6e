"""Patterns that name nodes, and source lines without the paths of a machine."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch.fx import Graph, GraphModule

from fxprec.inspection.nodes import places, select, short_paths, source_line
from fxprec.passes.graph.annotations import Op


def graph():
    body = Graph()
    body.output(body.call_function(torch.relu, (body.placeholder("y"),)))
    root = torch.nn.Module()
    root.body = GraphModule(torch.nn.Module(), body)
    outer = Graph()
    x = outer.placeholder("x")
    outer.get_attr("body")
    for path in ("linear", "encoder.layers.0.norm", "encoder.layers.10.norm"):
        x = outer.call_function(torch.exp, (x,))
        x.meta = {"nn_module_stack": {path: (path, torch.nn.Linear)}, "op": Op("exp")}
    x = outer.call_function(torch.tanh, (x,), name="linear")
    x.meta = {"op": Op("tanh")}
    outer.output(x)
    return list(places(0, GraphModule(root, outer)))


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("encoder", ["exp_1", "exp_2"]),
        ("encoder.layers.1", None),
        ("encoder.layers.1*", ["exp_2"]),
        ("*.norm", ["exp_1", "exp_2"]),
        ("linear", ["exp"]),
        ("node:linear", ["linear"]),
        ("node:lin*", ["linear"]),
        ("module:exp_1", None),
        ("op:tanh", ["linear"]),
        ("op:ex?", ["exp", "exp_1", "exp_2"]),
        ("body.relu", ["body.relu"]),
        ("exp_*", ["exp_1", "exp_2"]),
    ],
)
def test_patterns(pattern, names):
    found = graph()
    if names is None:
        with pytest.raises(ValueError, match="names no"):
            select(found, pattern)
    else:
        assert [place.name for place in select(found, pattern)] == names


def test_suggestions_are_of_the_kind_that_was_asked_for():
    with pytest.raises(ValueError, match=r"did you mean 'tanh'"):
        select(graph(), "op:tanhh")


def test_the_innermost_line_of_the_user_counts():
    node = next(place.node for place in graph() if place.name == "linear")
    linear = torch.nn.modules.linear.__file__
    here = str(Path.cwd() / "models" / "net.py")
    node.meta["stack_trace"] = (
        f'  File "{here}", line 99, in forward\n    x = self.first(x)\n'
        f'  File "{here}", line 3, in forward\n    x = self.fc(x)\n  File "{linear}", line 9, in forward\n    pass\n'
    )
    assert source_line(node) == "models/net.py:3"
    node.meta["stack_trace"] = f'  File "{linear}", line 9, in forward\n'
    assert source_line(node) == "modules/linear.py:9"
    node.meta["stack_trace"] = ""
    assert source_line(node) == ""


def test_paths_elsewhere_keep_their_last_two_parts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    elsewhere = os.sep + os.path.join("srv", "someone", "pkg", "net.py")
    assert short_paths(f"{elsewhere}:12 in forward: graph break in {elsewhere}") == (
        "pkg/net.py:12 in forward: graph break in pkg/net.py"
    )
