"""aliases: what shares memory, by edges of the graph, by names and by what capture says; casts end with each write."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fxprec.capture.symbolic.trace import trace_static
from fxprec.passes.graph.text import format_graph
from fxprec.passes.ops.aliases import alias_roots, outside_writes, written_by
from fxprec.programs.program import lift

BF16 = torch.bfloat16


@pytest.fixture
def graph(tools):
    """A graph of a function or module, up to a pass; ``shared``: placeholders and attributes that share memory."""

    def run(function, *inputs, shared=(), until="verify", **settings):
        module = isinstance(function, nn.Module)
        gm = trace_static(function, ["x", "i"][: len(inputs)], {}).gm if module else tools.traced(function, *inputs)
        for node in gm.graph.nodes:
            if str(node.target) in shared:
                node.meta["memory"] = 0
        return tools.rewritten(gm, tools.context(**settings), until=until)

    return run


def named(gm, name):
    return next(node for node in gm.graph.nodes if node.name == name)


def roots(gm):
    return {node.name: root.name for node, root in alias_roots(gm.graph).items() if node is not root}


def written(gm):
    return {node.name for node in outside_writes(gm)}


def linear_around_a_write(a, b, w):
    first = F.linear(b, w)
    a.mul_(2)
    return F.linear(b, w) - first


SQUARES = [torch.randn(4, 4) for _ in range(3)]


def test_a_cast_is_made_again_after_a_write_to_what_shares_the_memory(graph) -> None:
    gm = graph(linear_around_a_write, *SQUARES, shared=("a", "b"))
    text = format_graph(gm)
    assert text.index("%b_bf16:") < text.index("mul_(%a, 2)") < text.index("%b_bf16_1:")
    assert "linear(%b_bf16_1, %w_bf16" in text
    assert "%w_bf16_1" not in text


def test_what_shares_nothing_is_cast_once(graph) -> None:
    gm = graph(linear_around_a_write, *SQUARES)
    assert "%b_bf16_1" not in format_graph(gm)
    assert written(gm) == {"a"}


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("placement", ["mincut", "autocast"])
@pytest.mark.parametrize("regions", ["", "aten"])
def test_views_and_row_operations_see_the_write(graph, level, placement, regions) -> None:
    def function(a, b, w):
        turned = b.t()
        first = F.linear(turned, w)
        held = torch.relu(b * 3) + 1
        a.view(-1)[0:8].add_(5)
        return F.linear(turned, w) - first, F.linear(torch.relu(b * 3) + 1 - held, w), b.float() * 2

    gm = graph(function, *SQUARES, shared=("a", "b"), level=level, placement=placement, regions=regions)
    x, w = torch.randn(4, 4), torch.randn(4, 4)
    mine, theirs = x.clone(), x.clone()
    for ours, wanted in zip(gm(mine, mine, w), function(theirs, theirs, w), strict=True):
        torch.testing.assert_close(ours, wanted, rtol=3e-2, atol=0.2)
    assert torch.equal(mine, theirs)


def test_a_weight_that_is_written_under_another_name_has_no_shadow(graph) -> None:
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.w, self.other = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4, 4))
            self.register_buffer("b", self.w.data)

        def forward(self, x):
            y = F.linear(x, self.other) + F.linear(x, self.w)
            self.b.mul_(2)
            return F.linear(y, self.w)

    gm = graph(Own(), torch.randn(4, 4), shared=("w", "b"))
    program = lift(gm, BF16)
    assert (program.low, program.writes, program.writes_weights) == (("other",), True, True)
    assert set(program.plain) == {"w", "b"}
    program = lift(graph(Own(), torch.randn(4, 4)), BF16)
    assert (set(program.low), program.writes, program.writes_weights) == ({"other", "w"}, True, False)


def test_one_weight_under_two_nodes(graph) -> None:
    gm = graph(lambda x: x.mul(1.0), torch.randn(4), until="canonicalize")
    gm.register_buffer("held", torch.zeros(4))
    start = next(iter(gm.graph.nodes))
    with gm.graph.inserting_after(start):
        second = gm.graph.get_attr("held")
        first = gm.graph.get_attr("held")
    assert alias_roots(gm.graph)[second] is first


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda a, b: torch.broadcast_tensors(a, b)[1].mul_(2), {"a", "b"}),
        (lambda a, b: torch.meshgrid(a[0], b[0], indexing="ij")[0].relu(), set()),
        (lambda a, b: torch.atleast_2d([a, b])[1].mul_(2), {"a", "b"}),
        (lambda a, b: a.view_as(b).mul_(2), {"a"}),
        (lambda a, b: torch.add(a, 1, out=b), {"b"}),
        (lambda a, b: F.relu(a, inplace=True) + b, {"a"}),
        (lambda a, b: a.__setitem__(0, b[0]), {"a"}),
        (lambda a, b: F.embedding(torch.tensor([0]), a, max_norm=1.0) + b, {"a"}),
        (lambda a, b: F.embedding(torch.tensor([0]), a) + b, set()),
        (lambda a, b: F.batch_norm(a, b[0], b[1], training=True), {"b"}),
        (lambda a, b: F.batch_norm(a, b[0], b[1], training=False), set()),
        (lambda a, b: F.batch_norm(a, b[0], b[1]), set()),
        (lambda a, b: torch._foreach_mul_([a, b], 2), {"a", "b"}),
        (lambda a, b: a.clone().mul_(b), set()),
    ],
)
def test_who_writes_to_what_lies_outside(graph, function, expected) -> None:
    gm = graph(function, torch.rand(4, 4), torch.rand(4, 4), until="canonicalize")
    assert written(gm) == expected
    assert {node.name for node in gm.graph.nodes if node.meta.get("written")} == expected


def test_a_custom_op_says_in_its_schema_what_it_writes(graph) -> None:
    @torch.library.custom_op("aliases_test::double", mutates_args=("x",))
    def double(x: torch.Tensor) -> None:
        x.mul_(2)

    def function(a, b):
        torch.ops.aliases_test.double(a)  # a packet, which has no schema of its own
        double(b)

    gm = graph(function, until="canonicalize")
    assert written(gm) == {"a", "b"}


def test_the_body_of_a_checkpoint_writes_and_gives_back(graph) -> None:
    body = graph(lambda x, y: (x.mul_(2), x + y), until="canonicalize")
    gm = graph(lambda a, b: a + b, until="canonicalize")
    gm.body = body
    add = named(gm, "add")
    with gm.graph.inserting_before(add):
        attribute = gm.graph.get_attr("body")
        call = gm.graph.call_function(torch.ops.higher_order.wrap, (attribute, *add.args))
    call.meta["op"] = add.meta["op"]._replace(name="higher_order::wrap")
    a, b = add.args
    assert [*written_by(call)] == [a]
    assert alias_roots(gm.graph)[call] is a
    assert alias_roots(gm.graph)[b] is b
    assert outside_writes(gm) == {a}


def test_a_weight_that_a_lookup_rescales_is_read_in_its_place(graph) -> None:
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(8, 8, max_norm=1.0)

        def forward(self, x, i):
            before = F.linear(x, self.table.weight)
            return F.linear(self.table(i), self.table.weight) + before

    for level in ("O1", "O2"):
        model, twin = Tied(), Tied()
        twin.load_state_dict(model.state_dict())
        x, i = torch.randn(4, 8), torch.arange(4)
        gm = graph(model, x, i, level=level)
        with torch.no_grad():
            torch.testing.assert_close(gm(x, i), twin(x, i), rtol=2e-2, atol=5e-2)
        assert torch.equal(model.table.weight, twin.table.weight)
        assert lift(gm, BF16).low == ()
