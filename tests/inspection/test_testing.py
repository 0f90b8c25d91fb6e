"""fxprec.testing: assertions that name what is wrong, and the text form of graphs."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxprec
from fxprec.passes.graph.text import format_graph as text_of
from fxprec.testing import assert_graph, assert_precision, format_graph


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.drop = nn.Dropout(0.5)

    def forward(self, x, index):
        hidden = self.drop(self.norm(self.fc(x))).view(-1, 2, 4)
        return F.softmax(hidden[index], -1), index + 1


def converted(**options):
    inputs = (torch.randn(2, 8), torch.tensor([0, 1]))
    return fxprec.convert(Net(), inputs, dtype=torch.bfloat16, **options).module


def test_what_computes_in_which_dtype():
    model = converted()
    assert_precision(model, "fc", torch.bfloat16)
    assert_precision(model, "n?rm", torch.float32)
    assert_precision(model, "op:softmax", torch.float32)
    assert_precision(model, "op:softmax", torch.float32, what="output")
    assert_precision(fxprec.graph_module(model), "op:linear", torch.bfloat16, what="reads")


class Head(nn.Module):
    def forward(self, x):
        return F.softmax(x.view(-1, 2, 4), -1)


def test_of_a_module_only_what_computes_counts():
    model = fxprec.convert(nn.Sequential(nn.Linear(8, 8), Head()), (torch.randn(2, 8),), dtype=torch.bfloat16).module
    assert_precision(model, "1", torch.float32)
    assert_precision(model, "op:view", torch.bfloat16)
    assert_precision(model, "view", torch.bfloat16)
    with pytest.raises(ValueError, match="compute nothing"):
        assert_precision(model, "op:cast", torch.float32)


def test_computing_wide_between_low_ports():
    layers = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8))
    model = fxprec.convert(layers, (torch.randn(2, 8),), dtype=torch.bfloat16).module
    assert_precision(model, "1", torch.float32)
    assert_precision(model, "1", torch.bfloat16, what="reads")
    assert_precision(model, "1", torch.bfloat16, what="output")


def test_a_wrong_dtype_is_named_with_its_reason():
    with pytest.raises(
        AssertionError, match=r"(?s)1 of 1 .*expected compute float32.*%linear = linear computes in bf"
    ) as e:
        assert_precision(converted(), "fc", torch.float32)
    assert "low, " in str(e.value)
    assert "test_testing.py:" in str(e.value)


def test_every_graph_is_looked_at():
    model, _ = fxprec.convert(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)), dtype=torch.bfloat16)
    model(torch.randn(2, 4))
    model.eval()(torch.randn(2, 4))
    count = len(fxprec.graphs(model))
    assert count >= 2
    with pytest.raises(AssertionError, match=f"{count} of {count} nodes"):
        assert_precision(model, "op:linear", torch.float32)


@pytest.mark.parametrize("pattern", ["fcc", "op:softmaxx", "drop*x"])
def test_a_pattern_that_names_nothing(pattern):
    with pytest.raises(ValueError, match=r"names no .*op:softmax"):
        assert_precision(converted(), pattern, torch.float32)


def test_a_pattern_that_names_no_float():
    with pytest.raises(ValueError, match="nothing with floats"):
        assert_precision(converted(), "op:add", torch.float32)


def test_arguments_are_checked():
    with pytest.raises(TypeError, match=r"torch\.float32"):
        assert_precision(converted(), "fc", "float32")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="'compute', 'output', 'reads'"):
        assert_precision(converted(), "fc", torch.float32, what="result")  # type: ignore[arg-type]


def test_text_of_one_graph_and_of_several():
    model = converted()
    gm = fxprec.graph_module(model)
    assert format_graph(model) == format_graph(gm) == text_of(gm)
    model.eval()(torch.randn(2, 8), torch.tensor([0]))
    text = format_graph(model)
    assert text.startswith("# graph 1\n" + text_of(gm) + "\n\n# graph 2\n%x: float32 = placeholder\n")


def test_bodies_of_higher_order_ops_follow():
    body = torch.fx.symbolic_trace(lambda y: y.relu())
    root = nn.Module()
    root.body = body
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_function(torch.ops.higher_order.cond, (x, graph.get_attr("body"), x)))
    text = format_graph(torch.fx.GraphModule(root, graph))
    assert text.endswith("\n\n# body\n" + text_of(body))


def test_assert_graph():
    model, _ = fxprec.convert(lambda x, y: torch.exp(x @ y), (torch.ones(2, 2),) * 2, dtype=torch.bfloat16)
    text = format_graph(model)
    assert_graph(model, "\n".join("        " + line for line in text.split("\n")))
    with pytest.raises(AssertionError, match=r"(?m)^-%exp: float64 = exp.*\n\+%exp: float32 = exp"):
        assert_graph(model, text.replace("%exp: float32", "%exp: float64"))


# -- stale shadows -----------------------------------------------------------------------------------------------------


#: An element that is no sample of a weight of 16.
UNSEEN = 3


def by_data(weight):
    weight.data.view(-1)[UNSEEN] *= 2


def by_raw_kernel(weight):
    torch._fused_sgd_(
        [weight.detach()],
        [torch.ones_like(weight) * (torch.arange(16).view(4, 4) == UNSEEN)],
        [],
        weight_decay=0.0,
        momentum=0.0,
        lr=0.1,
        dampening=0.0,
        nesterov=False,
        maximize=False,
        is_first_step=True,
    )


def by_numpy(weight):
    weight.detach().numpy().reshape(-1)[UNSEEN] *= 2


@pytest.mark.parametrize("dynamo", [False, True], ids=["static", "dynamo"])
@pytest.mark.parametrize("write", [by_data, by_raw_kernel, by_numpy])
def test_check_shadows_names_a_weight_that_was_written_unseen(write, dynamo):
    model, _ = fxprec.convert(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), capture="dynamo" if dynamo else "auto")
    x = torch.randn(2, 4)
    with torch.no_grad():
        before = model(x)
        write(model[1].weight)
        assert torch.equal(model(x), before)  # stale, which nothing says
        with fxprec.testing.check_shadows(model):
            with pytest.raises(fxprec.StaleShadowError, match=r"stale: 1\.weight of shape \(4, 4\).*fxprec\.refresh"):
                model(x)
            fxprec.refresh(model)
            model(x)
    with fxprec.testing.check_shadows(model):
        write(model[1].weight)
        model(x)  # a training forward copies anyway
    assert not torch.equal(model(x), before)
    with fxprec.testing.check_shadows(model):
        pass
    with torch.no_grad():
        write(model[0].weight)
        model(x)  # the block is left


def test_check_shadows_wants_a_converted_model():
    with pytest.raises(fxprec.ConversionError, match="is not converted"), fxprec.testing.check_shadows(nn.Linear(2, 2)):
        pass
