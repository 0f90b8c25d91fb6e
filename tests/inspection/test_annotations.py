"""assert_annotations_hold: what the graph states is what runs, on the graph itself and on the programs made of it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import fxprec
from fxprec.testing import assert_annotations_hold


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x, index):
        hidden = F.dropout(self.norm(self.fc(x)), training=self.training)
        top = hidden.max(-1)
        return F.softmax(hidden[index], -1), top.indices, top.values


class Checkpointed(Net):
    def forward(self, x, index):
        hidden = checkpoint(lambda y: torch.exp(self.fc(y)), x, use_reentrant=False)
        return F.softmax(hidden[index], -1)


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.lstm = nn.LSTM(8, 4, batch_first=True, bidirectional=True)
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        return self.head(self.lstm(self.embed(x))[0])


class Conv(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)

    def forward(self, x):
        hidden = torch.relu_(self.norm(self.conv(x)))
        hidden[:, 0] = 0
        hidden += F.interpolate(F.max_pool2d(hidden, 2), scale_factor=2)
        return F.log_softmax(hidden.mean((2, 3)), 1), hidden.std()


MODELS = {
    "tagger": (Tagger, torch.randint(0, 20, (2, 7))),
    "conv": (Conv, torch.randn(2, 3, 8, 8)),
    "transformer": (lambda: nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), torch.randn(2, 5, 16)),
}

INPUTS = (torch.randn(4, 8), torch.tensor([0, 2]))


def lie(gm, op):
    """State another output dtype of one node than it has."""
    (node,) = [node for node in gm.graph.nodes if node.meta.get("op", ("",))[0] == op]
    precision = node.meta["precision"]
    other = torch.float32 if precision.output is torch.bfloat16 else torch.bfloat16
    node.meta["precision"] = precision._replace(output=other)


@pytest.mark.parametrize("options", [{}, {"level": "O2"}, {"level": "O0"}, {"capture": "dynamo"}, {"fuse": False}])
def test_they_hold(options):
    model, _ = fxprec.convert(Net(), INPUTS, dtype=torch.bfloat16, **options)
    assert_annotations_hold(model, *INPUTS)
    assert_annotations_hold(model, INPUTS[0], index=INPUTS[1])


@pytest.mark.slow
@pytest.mark.parametrize("placement", ["mincut", "autocast"])
@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("name", MODELS)
def test_they_hold_in_models(name, level, placement):
    build, x = MODELS[name]
    model, _ = fxprec.convert(build(), (x,), level=level, placement=placement, dtype=torch.bfloat16)
    assert_annotations_hold(model, x)
    assert_annotations_hold(model.eval(), x)


def test_they_hold_in_a_graph_by_itself():
    model, _ = fxprec.convert(Net(), INPUTS, dtype=torch.bfloat16)
    gm = fxprec.graph_module(model)
    mean = model.norm.running_mean.clone()
    state = torch.get_rng_state()
    assert_annotations_hold(gm, *INPUTS)
    assert torch.equal(model.norm.running_mean, mean)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_wrong_one_is_named():
    model, _ = fxprec.convert(Net(), INPUTS, dtype=torch.bfloat16)
    gm = fxprec.graph_module(model)
    lie(gm, "linear")
    with pytest.raises(AssertionError, match=r"node %linear .*got bfloat16, expected float32 \(low: "):
        assert_annotations_hold(gm, *INPUTS)


def test_a_wrong_one_is_named_in_what_a_converted_module_runs(monkeypatch):
    model, _ = fxprec.convert(Net(), INPUTS, dtype=torch.bfloat16)
    rewrite = fxprec.programs.packed_weights.run_passes  # type: ignore[attr-defined]

    def lying(gm, context):
        rewrite(gm, context)
        lie(gm, "softmax")
        return gm

    monkeypatch.setattr("fxprec.programs.packed_weights.run_passes", lying)
    with pytest.raises(AssertionError, match=r"node %softmax .*got float32, expected bfloat16"):
        assert_annotations_hold(model, *INPUTS)


def test_bodies_of_higher_order_ops_are_checked(monkeypatch):
    model, _ = fxprec.convert(Checkpointed(), INPUTS, dtype=torch.bfloat16)
    assert_annotations_hold(model, *INPUTS)
    body = next(m for m in fxprec.graph_module(model).children() if isinstance(m, torch.fx.GraphModule))
    lie(body, "exp")
    with pytest.raises(AssertionError, match=r"node %\w+\.exp .*got float32, expected bfloat16"):
        assert_annotations_hold(fxprec.graph_module(model), *INPUTS)


def test_the_model_is_left_alone():
    model, _ = fxprec.convert(Net(), INPUTS, dtype=torch.bfloat16)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    graphs = fxprec.graphs(model)
    assert_annotations_hold(model, *INPUTS)
    assert fxprec.graphs(model) == graphs
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_what_has_no_annotations_is_refused():
    with pytest.raises(ValueError, match="neither converted"):
        assert_annotations_hold(nn.Linear(2, 2), torch.ones(2, 2))
    with pytest.raises(ValueError, match="neither converted"):
        assert_annotations_hold(torch.fx.symbolic_trace(nn.Linear(2, 2)), torch.ones(2, 2))


@pytest.mark.parametrize("op", ["default", "packet"])
@pytest.mark.parametrize("taken", [slice(0, 1), slice(1, 2), slice(None)])
def test_a_result_that_stays_wide_whatever_arrives(op, taken):
    """An attention kernel's logsumexp is FP32: where it is used the op is not lowered, where it is not it is."""
    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    attention = attention if op == "packet" else getattr(attention, op)

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(8, 8)

        def forward(self, x):
            x = self.fc(x)
            results = attention(x, x, x)
            return sum((each * each).sum() for each in [results[0], results[1]][taken])

    model = Attention()
    x = torch.randn(1, 2, 4, 8)
    expected = model(x)
    model = fxprec.convert(model, dtype=torch.bfloat16).module
    torch.testing.assert_close(model(x), expected, rtol=0.02, atol=0.02)
    assert_annotations_hold(model, x)
    (node,) = [node for node in fxprec.graph_module(model).graph.nodes if node.target is attention]
    assert node.meta["precision"].compute is (torch.bfloat16 if taken == slice(0, 1) else torch.float32)
