"""torch.compile(backend="fxprec"): the rewritten graphs, shadows that follow the weights, bad options refused."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxprec


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.norm = nn.Linear(16, 16), nn.LayerNorm(16)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        self.count += 1
        return x + self.fc(self.norm(x))


def model():
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block(), nn.Linear(16, 4))


@pytest.fixture(autouse=True)
def _fresh():
    torch.compiler.reset()


def count_casts_of(run, x):
    with fxprec.testing.count_casts() as casts:
        run(x)
    return casts.total


def compiled(net, **options):
    graphs = []
    return torch.compile(net, backend="fxprec", options={"on_graph": graphs.append, **options}), graphs


def test_training_is_beside_fp32_and_convert():
    plain, converted, own = model(), model(), model()
    converted, _ = fxprec.convert(converted)
    run, graphs = compiled(own)
    losses = []
    for net, call in ((plain, plain), (converted, converted), (own, run)):
        optimizer, per_net = torch.optim.SGD(net.parameters(), lr=0.1), []
        torch.manual_seed(1)
        for _ in range(4):
            optimizer.zero_grad()
            loss = F.cross_entropy(call(torch.randn(8, 16)), torch.randint(4, (8,)))
            loss.backward()
            optimizer.step()
            per_net.append(loss.item())
        losses.append(per_net)
    assert losses[2] == pytest.approx(losses[1], abs=1e-6) and losses[2] == pytest.approx(losses[0], rel=0.02)
    (graph,) = graphs
    assert fxprec.report(graph).headline.products == {"bfloat16": 3}
    assert {"0.fc", "1.fc", "2"} <= {row.module for row in fxprec.report(graph).graphs[0].rows}
    assert own[0].count == 4 and own[0].fc.weight.grad.dtype is torch.float32


def test_weights_are_shadows_and_follow_what_is_written(tools):
    net, x = model(), torch.randn(8, 16)
    run, _ = compiled(net)
    with torch.no_grad():
        run(x)
        assert tools.matmul_dtypes(run, x) == {torch.bfloat16: 3}
        assert count_casts_of(run, x) == 4  # three that products read, and the output: no weight
        net.load_state_dict({name: value * 2 for name, value in net.state_dict().items()})
        twin = copy.deepcopy(net)
        out, exact = run(x), twin(x)
    assert (out - exact).abs().max() < 0.01 * exact.abs().max()


def test_two_models_of_a_class_do_not_mix():
    first, second = model(), model()
    with torch.no_grad():
        second[2].weight.mul_(-1)
        second[2].bias.mul_(-1)
    x = torch.randn(8, 16)
    with torch.no_grad():
        torch.testing.assert_close(compiled(first)[0](x), -compiled(second)[0](x))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"levl": "O1"}, "unknown option 'levl'.*level"),
        ({"level": "O3"}, "level O3 changes parameters"),
        ({"dtype": torch.float64}, "models are lowered to"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(Exception, match=message):
        compiled(model(), **options)[0](torch.randn(2, 16))


def test_beside_autocast_or_a_mode_it_is_refused():
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(Exception, match="both would insert casts"):
        compiled(model())[0](torch.randn(2, 16))
    with pytest.raises(Exception, match="is inductor's"):
        torch.compile(model(), backend="fxprec", mode="max-autotune")(torch.randn(2, 16))


def test_float16_has_to_be_asked_for():
    run, graphs = compiled(model(), dtype=torch.float16)
    run(torch.randn(2, 16))
    assert fxprec.report(graphs[0]).headline.products == {"float16": 3}
