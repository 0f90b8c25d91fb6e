"""Weights whose names a graph module cannot have: they stand in it under others, and its state goes by the model's."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch.fx import symbolic_trace

import fxprec
from fxprec.capture.lazy_code import attribute_path

X = torch.randn(2, 4, generator=torch.Generator().manual_seed(0))


class Named(nn.Module):
    """(N, 4) -> the same, by one weight or submodule of a given name."""

    def __init__(self, name, kind):
        super().__init__()
        self.mine = name
        if kind == "module":
            self.add_module(name, nn.Linear(4, 4))
        elif kind == "buffer":
            self.register_buffer(name, torch.full((4,), 3.0))
        else:
            self.register_parameter(name, nn.Parameter(torch.full((4,), 3.0)))

    def forward(self, x):
        mine = getattr(self, self.mine)
        return mine(x) if isinstance(mine, nn.Module) else x * mine


class Heads(nn.Module):
    """Keys of dicts may be anything but a path."""

    KEYS = ("class", "in", "class_", 'a"b', "it's", "back\\slash", "line\nbreak", "a_x22_b")

    def __init__(self):
        super().__init__()
        self.heads = nn.ModuleDict({key: nn.Linear(4, 4) for key in self.KEYS})

    def forward(self, x):
        return torch.stack([self.heads[key](x) for key in self.KEYS])


@pytest.mark.parametrize("capture", ["symbolic", "dynamo"])
@pytest.mark.parametrize("kind", ["parameter", "buffer", "module"])
@pytest.mark.parametrize("name", ["code", "graph", "meta", "_graph", "real_recompile", "code_", "lambda"])
def test_names_that_a_graph_module_needs_for_itself(name, kind, capture):
    model = Named(name, kind)
    keys = [*model.state_dict()]
    expected = model(X)
    fxprec.convert(model, (X,), dtype=torch.bfloat16, capture=capture)
    torch.testing.assert_close(model(X), expected, rtol=0.02, atol=0.02)
    gm = fxprec.graph_module(model)
    assert [*gm.state_dict()] == keys and gm.code.count(f"self.{attribute_path(name)}") >= 1
    for copied in (gm, copy.deepcopy(gm), copy.copy(gm)):
        assert torch.equal(value(copied), value(model)) and [*copied.state_dict()] == keys
        state = {key: torch.full_like(tensor, 0.5) for key, tensor in model.state_dict().items()}
        before = copy.deepcopy(copied.state_dict())
        copied.load_state_dict(state)
        assert all(torch.equal(tensor, torch.full_like(tensor, 0.5)) for tensor in copied.state_dict().values())
        copied.load_state_dict(before)
    assert torch.equal(value(symbolic_trace(gm)), value(model))
    assert torch.equal(value(torch.export.export(gm, (X,)).module()), value(model))
    model.eval()
    fxprec.freeze(model)
    assert [*model.state_dict()] == keys


def value(module):
    output = module(X)
    return output[0] if isinstance(output, tuple) else output


@pytest.mark.parametrize("capture", ["symbolic", "dynamo"])
def test_what_is_no_name_in_python(capture):
    model = Heads()
    keys, expected = [*model.state_dict()], model(X)
    fxprec.convert(model, (X,), dtype=torch.bfloat16, capture=capture)
    torch.testing.assert_close(model(X), expected, rtol=0.02, atol=0.02)
    gm = fxprec.graph_module(model)
    assert [*gm.state_dict()] == keys
    for copied in (
        gm,
        symbolic_trace(gm),
        pickle.loads(pickle.dumps(symbolic_trace(gm))),
    ):
        assert torch.equal(value(copied), value(model))
    assert str(fxprec.explain(model, "heads.class")).count("heads.class.weight") == 1


def test_no_two_paths_become_one():
    names = [*Heads.KEYS, "code", "code_", "code__", "meta", "a_x5f_x22_b", "a_", "_", "plain"]
    paths = [f"{outer}{name}" for name in names for outer in ("", "part.")]
    assert len({attribute_path(path) for path in paths}) == len(set(paths))
    assert attribute_path("encoder.0.weight") == "encoder.0.weight"


def test_within_another_module_too():
    model, _ = fxprec.convert(Named("code", "module"), (X,), dtype=torch.bfloat16)
    around = nn.Sequential(nn.ReLU(), fxprec.graph_module(model))
    assert [*around.state_dict()] == ["1.code.weight", "1.code.bias"]
    file = io.BytesIO()
    torch.save(around.state_dict(), file)
    file.seek(0)
    around.load_state_dict(torch.load(file))
    missing = around.load_state_dict({"1.code.weight": torch.zeros(4, 4)}, strict=False)
    assert torch.equal(model.code.weight, torch.zeros(4, 4)) and len(missing.missing_keys) == 1


def test_the_state_is_that_of_the_model():
    """Both names of a tied weight; no buffer that the model does not save, and no constant of the graph."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
            self.b.weight = self.a.weight
            self.register_buffer("saved", torch.ones(4))
            self.register_buffer("unsaved", torch.ones(4), persistent=False)

        def forward(self, x):
            return self.b(self.a(x)) * self.saved + self.unsaved * torch.arange(4.0)

    for capture in ("symbolic", "dynamo"):
        model, _ = fxprec.convert(Model(), (X,), dtype=torch.bfloat16, capture=capture)
        gm = fxprec.graph_module(model)
        for copied in (gm, copy.deepcopy(gm)):
            assert copied.state_dict().keys() == model.state_dict().keys()
            copied.load_state_dict(model.state_dict())
        assert gm.a.weight is gm.b.weight is model.a.weight


def test_the_report_and_policies_go_by_the_users_paths():
    policy = fxprec.Policy.preset("O1").override(modules={"code": torch.float32})
    model, _ = fxprec.convert(nn.Sequential(Named("code", "module")), (X,), dtype=torch.bfloat16)
    assert "0.code" in str(fxprec.explain(model, "0.code")) and "code_" not in str(fxprec.report(model).nodes)
    model, _ = fxprec.convert(Named("code", "module"), (X,), dtype=torch.bfloat16)
    explained = str(fxprec.explain(model, "code"))
    assert "code.weight as its bfloat16 shadow" in explained and "code_" not in explained
    assert "code_" not in str(fxprec.report(model).nodes)
    model, _ = fxprec.convert(Named("code", "module"), (X,), dtype=torch.bfloat16, policy=policy)
    fxprec.testing.assert_precision(model, "code", torch.float32)
