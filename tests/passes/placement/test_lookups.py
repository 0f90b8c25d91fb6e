"""Lookups and the like on a CPU read FP32 weights: torch adds the gradient of a row up in the dtype of the weight."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxprec

FP32, BF16 = torch.float32, torch.bfloat16
LOOKUPS = {
    "embedding": lambda w, ids: F.embedding(ids, w),
    "embedding of a product": lambda w, ids: F.embedding(ids, w * 2.0),
    "embedding, written": lambda w, ids: F.embedding(ids, w).mul_(2.0),
    "embedding_bag": lambda w, ids: F.embedding_bag(ids, w, mode="sum").expand(2, -1, -1),
    "take": lambda w, ids: torch.take(w, ids[..., None] * 16 + torch.arange(16)),
}


#: Looked up by an index: what is made of a weight without a product is a table as the weight itself.
TABLES = {
    "itself": lambda w: w,
    "view": lambda w: w.view(4, 2, 16).view(8, 16),
    "contiguous": lambda w: w.contiguous(),
    "t": lambda w: w.t().t(),
    "flatten": lambda w: w.view(2, 4, 16).flatten(0, 1),
    "chunk": lambda w: w.chunk(1)[0],
    "unbind": lambda w: w.view(1, 8, 16).unbind()[0],
    "cat": lambda w: torch.cat((w[:4], w[4:])),
    "a product of elements": lambda w: w * 2.0 + 1.0,
    "interpolate": lambda w: F.interpolate(w.t()[None], size=9, mode="linear")[0].t(),
    "softmax": lambda w: w.softmax(-1),
    "float": lambda w: w.float(),
}
#: What else adds up gradients of one place.
REPEATED = {
    "take": lambda w: w.contiguous().take((torch.arange(4096) % 3)[:, None] * 16 + torch.arange(16)),
    "columns": lambda w: w.t()[:, torch.arange(4096) % 3].t(),
    "two indices": lambda w: w[torch.arange(4096)[:, None] % 3, torch.arange(16)],
    "replicate": lambda w: F.pad(w.t()[None], (2000, 2000), mode="replicate")[0].t(),
    "replicate, in two dimensions": lambda w: F.pad(w[None, None], (0, 0, 200, 200), mode="replicate")[0, 0],
    "grid_sample": lambda w: F.grid_sample(
        w.t().view(1, 16, 2, 4), torch.linspace(-1, 1, 8192).view(1, 64, 64, 2), align_corners=False
    ).flatten(2)[0].t(),
}  # fmt: skip


class Lookup(nn.Module):
    def __init__(self, lookup):
        super().__init__()
        torch.manual_seed(0)
        self.lookup, self.weight, self.head = lookup, nn.Parameter(torch.randn(8, 16)), nn.Linear(16, 8)

    def forward(self, ids):
        return self.head(self.lookup(self.weight, ids))


@pytest.mark.parametrize(
    ("spelling", "settings"),
    [
        *((each, {"level": "O2"}) for each in LOOKUPS),
        ("take", {"level": "O1"}),
        ("embedding", {"level": "O2", "capture": "dynamo"}),
        ("embedding", {"level": "O2", "placement": "autocast"}),
        ("embedding", {"level": "O3"}),
    ],
    ids=str,
)
def test_the_gradient_of_a_frequent_row_does_not_stall(spelling, settings):
    ids = torch.arange(4096).view(8, 512) % 20 % 8
    model = Lookup(LOOKUPS[spelling])
    model(ids).square().sum().backward()
    converted = fxprec.convert(Lookup(LOOKUPS[spelling]), dtype=BF16, **settings).module
    converted(ids).square().sum().backward()
    assert (converted.weight.grad - model.weight.grad).norm() <= 0.02 * model.weight.grad.norm()


def check(f, **settings):
    torch.manual_seed(1)
    factor = torch.rand(8)
    model = Lookup(lambda w, ids: f(w))
    (model(None) * factor).square().sum().backward()
    converted = fxprec.convert(Lookup(model.lookup), dtype=BF16, **settings).module
    (converted(None) * factor).square().sum().backward()
    assert (converted.weight.grad - model.weight.grad).norm() <= 0.02 * model.weight.grad.norm()


@pytest.mark.parametrize("settings", [{}, {"level": "O2"}, {"capture": "dynamo"}], ids=str)
@pytest.mark.parametrize("spelling", TABLES)
def test_what_is_made_of_a_weight_is_a_table(spelling, settings):
    check(lambda w: TABLES[spelling](w)[torch.arange(4096) % 20 % 8], **settings)


@pytest.mark.parametrize("settings", [{}, {"level": "O2"}, {"capture": "dynamo"}, {"level": "O3"}], ids=str)
@pytest.mark.parametrize("spelling", REPEATED)
def test_the_gradient_of_a_place_that_is_often_read_does_not_stall(spelling, settings):
    check(REPEATED[spelling], **settings)


@pytest.mark.parametrize("placement", ["mincut", "autocast"])
def test_the_placements_are_one_on_tables(placement):
    check(lambda w: w.view(8, 16)[torch.arange(4096) % 20 % 8], placement=placement, level="O2")


@pytest.fixture
def reads(tools):
    def run(f, level="O1", **settings):
        gm = tools.traced(f, torch.randn(1, 8, 8), torch.randn(8, 8), torch.arange(8))
        tools.rewritten(gm, tools.context(level, **settings), until="decide")
        return {node.name: node.meta["precision"] for node in gm.graph.nodes}

    return run


def test_what_a_product_made_is_low_as_under_autocast(reads):
    found = reads(lambda x, w, ids: F.linear(F.linear(x, w)[:, ids] + F.linear(x, w).transpose(1, 2)[:, ids], w))
    assert found["getitem"].output is found["getitem_1"].output is BF16


def test_what_autocast_widens_is_looked_up_in_fp32_unless_activations_are_low(reads):
    def f(x, w, ids):
        return F.linear(F.softmax(F.linear(x, w), -1).transpose(1, 2)[:, ids], w)

    assert reads(f)["getitem"].reads is FP32
    assert reads(f, "O2")["getitem"].reads is not FP32


def test_borders_of_activations_cost_no_cast(reads):
    def f(x, w, ids):
        return F.linear(F.pad(F.layer_norm(F.linear(x, w), (8,)), (4, 4), mode="replicate")[..., 4:12], w)

    assert reads(f)["pad"].reads is BF16


def test_a_table_costs_one_cast_behind():
    model = fxprec.convert(Lookup(lambda w, ids: w.view(8, 16)[ids]), (torch.arange(9) % 8,), dtype=BF16).module
    nodes = {node.name: node for node in fxprec.graph_module(model).graph.nodes}
    (cast,) = nodes["getitem"].users
    assert nodes["getitem"].meta["precision"].output is nodes["view"].meta["precision"].output is FP32
    assert cast.meta["precision"].output is BF16 and [*cast.users] == [nodes["linear"]]


def test_a_lookup_costs_one_cast_and_widens_nobody():
    model = fxprec.convert(Lookup(LOOKUPS["embedding"]), dtype=BF16, level="O2").module
    nodes = {node.name: node for node in fxprec.graph_module(model).graph.nodes}
    (cast,) = nodes["embedding"].users
    assert nodes["embedding"].meta["precision"].reads is FP32
    assert cast.meta["precision"].output is BF16 and [*cast.users] == [nodes["linear"]]


def test_a_gpu_adds_up_in_fp32_itself(tools):
    gm = tools.traced(
        lambda ids, w: F.linear(F.embedding(ids, w), w), torch.zeros(4, dtype=torch.long), torch.randn(4, 4)
    )
    tools.rewritten(gm, tools.context("O2", device="cuda"), until="decide")
    assert {node.name: node.meta["precision"].reads for node in gm.graph.nodes}["embedding"] is BF16


#: Read by an index, as nodes of a graph by its edges: values and inputs that autocast has in FP32.
STREAMS = {
    "a sum with the input": lambda m, x: F.relu(m.first(x) + x),
    "a list with a weight": lambda m, x: torch.cat((m.first(x[:1]), m.weight[None])),
    "a view": lambda m, x: (m.first(x) + m.weight).view(1, 2, 8)[0],
    "the input": lambda m, x: F.relu(x),
}


#: How its edges, an argument, become the index.
EDGES = {
    "as they come": lambda edges: edges,
    "in another shape": lambda edges: edges.reshape(2, -1),
    "one of two rows": lambda edges: edges.view(2, -1).unbind(0)[0],
    "computed": lambda edges: (edges + 2) % 2,
    "beside a slice": lambda edges: (edges, slice(None)),
}
#: What else gives back the gradients of other places, or sums that stall, where autocast has the value in FP32.
PICKS = {
    "unfold": ((1, 600), lambda x: x.unfold(1, 300, 1)),
    "im2col": ((20, 20), lambda x: F.unfold(x[None, None], 15, padding=7)),
    "max_pool1d": ((4, 2000), lambda x: F.max_pool1d(x, 25, 1, 12)),
    "max_pool2d": ((40, 200), lambda x: F.max_pool2d(x[None, None], 13, 1, 6)),
    "max_pool2d, large steps": ((40, 200), lambda x: F.max_pool2d(x[None, None], 4)),
    "adaptive_max_pool1d": ((1, 8), lambda x: F.adaptive_max_pool1d(x, 8000)),
    "adaptive_avg_pool1d": ((1, 8), lambda x: F.adaptive_avg_pool1d(x, 8000)),
    "avg_pool1d": ((1, 600), lambda x: F.avg_pool1d(x, 301, 1, 150)),
    "amax": ((1600, 8), lambda x: x.amax(0)),
    "amin": ((8, 1600), lambda x: x.amin(-1)),
}


class Stream(nn.Module):
    def __init__(self, made):
        super().__init__()
        torch.manual_seed(0)
        self.made, self.first, self.last = made, nn.Linear(8, 8), nn.Linear(8, 8)
        self.weight = nn.Parameter(torch.rand(8))
        self.register_buffer("edges", torch.arange(4096) % 2)

    def forward(self, x):
        return self.last(self.made(self, x)[self.edges])


class StreamAlongEdges(Stream):
    def __init__(self, made, index):
        super().__init__(made)
        self.index = index

    def forward(self, x, edges):
        return self.last(self.made(self, x)[self.index(edges)])


def check_stream(make, *inputs, **settings):
    torch._dynamo.reset()
    found = []
    for model in (make(), fxprec.convert(make(), dtype=BF16, **settings)[0]):
        x = torch.rand(2, 8, generator=torch.Generator().manual_seed(1), requires_grad=True)
        model(x, *inputs).sum().backward()
        found.append([each.grad for each in (*model.parameters(), x) if each.grad is not None])
    for ours, expected in zip(*reversed(found), strict=True):
        assert (ours - expected).norm() <= 0.02 * expected.norm()


@pytest.mark.parametrize("capture", ["symbolic", "dynamo"])
@pytest.mark.parametrize("spelling", STREAMS)
def test_gradients_of_what_autocast_has_in_fp32_do_not_stall(spelling, capture):
    check_stream(lambda: Stream(STREAMS[spelling]), capture=capture)


@pytest.mark.parametrize("placement", ["mincut", "autocast"])
@pytest.mark.parametrize("edges", EDGES)
def test_nor_do_they_where_nobody_knows_that_the_index_is_a_tensor(edges, placement):
    made = STREAMS["a sum with the input"]
    check_stream(
        lambda: StreamAlongEdges(made, EDGES[edges]), torch.arange(4096) % 2, capture="symbolic", placement=placement
    )


def test_an_unknown_index_into_memory_that_is_written_is_a_part_of_it():
    class Written(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.weight = nn.Parameter(torch.randn(8, 8))

        def forward(self, x, ids):
            y = F.linear(x, self.weight) + x
            part = y[ids]
            part.add_(1)
            return F.linear(y, self.weight)

    x = torch.randn(4, 8)
    model = fxprec.convert(Written(), dtype=BF16, capture="symbolic").module
    for index in (2, torch.tensor([0, 2])):
        assert (model(x, index) - Written()(x, index)).norm() <= 0.02 * Written()(x, index).norm()


class Pick(nn.Module):
    def __init__(self, pick):
        super().__init__()
        torch.manual_seed(0)
        self.pick, self.last = pick, nn.Conv1d(1, 4, 5, 3)
        self.last.weight.data.abs_()

    def forward(self, x):
        return self.last(self.pick(x).flatten()[None])


@pytest.mark.parametrize("settings", [{}, {"capture": "dynamo"}, {"placement": "autocast"}], ids=str)
@pytest.mark.parametrize("name", PICKS)
def test_what_picks_or_repeats_reads_fp32_where_autocast_has_it(name, settings):
    torch._dynamo.reset()
    (shape, pick), found = PICKS[name], []
    for model in (Pick(pick), fxprec.convert(Pick(pick), dtype=BF16, **settings)[0]):
        x = torch.rand(shape, generator=torch.Generator().manual_seed(1), requires_grad=True)
        model(x).sum().backward()
        found.append(x.grad)
    assert (found[1] - found[0]).norm() <= 0.01 * found[0].norm()
