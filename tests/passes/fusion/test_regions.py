"""find_regions: which nodes become one kernel, which must not, and that each group is convex."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from fxprec.passes.fusion.effects import order_of_effects
from fxprec.passes.fusion.regions import Region, find_regions

X, W, B = torch.randn(8, 16), torch.randn(16, 16), torch.randn(16)


def regions(tools, function, *inputs: Tensor, known: bool = True) -> tuple[GraphModule, list[Region]]:
    gm = tools.rewritten(tools.traced(function, *(inputs if known else ())), tools.context(), until="fold_casts")
    found = find_regions(gm.graph, order_of_effects(gm.graph))
    for region in found:
        assert_convex(region)
    return gm, found


def assert_convex(region: Region) -> None:
    """No path leaves the region and comes back."""
    inside, seen = set(region.nodes), set()
    pending = [user for node in region.nodes for user in node.users if user not in inside]
    while pending:
        node = pending.pop()
        assert node not in inside, f"{node} of {region.name} can be reached from outside"
        if node not in seen:
            seen.add(node)
            pending += node.users


def names(found: list[Region]) -> list[list[str]]:
    return [[node.name for node in region.nodes] for region in found]


def test_between_two_matmuls(tools):
    def f(x, w, b):
        return F.linear(F.gelu(F.linear(x, w) + b) * 2, w)

    _, (region,) = regions(tools, f, X, W, B)
    assert region.name == "fused_add_gelu_mul" and region.reduced == 0 and region.shape == (8, 16)
    assert [node.name for node in region.inputs] == ["linear", "b"]
    assert [node.name for node in region.outputs] == ["mul_bf16"]  # the cast costs nothing


def test_a_path_through_a_matmul_parts_two_regions(tools):
    def f(x, w):
        a = F.linear(x, w).relu() + 1
        return F.linear(a, w) * a + a

    gm, found = regions(tools, f, X, W)
    assert [region.name for region in found] == ["fused_relu_add", "fused_mul_add"]
    assert len({node for region in found for node in region.nodes}) == sum(len(region.nodes) for region in found)
    assert isinstance(gm.graph.output_node(), Node)


@pytest.mark.parametrize(
    ("reduce", "reduced"),
    [
        (lambda x: x.mean(-1, keepdim=True), 1),
        (lambda x: F.layer_norm(x, (8, 16)), 2),
        (lambda x: x.sum((2, 1), keepdim=True), 2),
        (lambda x: x.softmax(2), 1),
        (lambda x: F.rms_norm(x, normalized_shape=(16,)), 1),
    ],
)
def test_reductions_over_the_last_dimensions_join(tools, reduce, reduced):
    _, (region,) = regions(tools, lambda x: reduce(x * 2) + 1, torch.randn(2, 8, 16))
    assert region.reduced == reduced and region.shape == (2, 8, 16)
    assert {"mul", "add"} <= {node.name for node in region.nodes}


@pytest.mark.parametrize("reduce", [lambda x: x.softmax(1), lambda x: x.sum(0, keepdim=True), lambda x: x.mean()])
def test_others_stay(tools, reduce):
    _, found = regions(tools, lambda x: (reduce(x * 2) * 3).relu(), torch.randn(2, 8, 16))
    assert all(node.meta["op"].name in ("mul", "relu") for region in found for node in region.nodes)


def test_reductions_over_different_dimensions_are_two_regions(tools):
    _, found = regions(
        tools, lambda x: F.layer_norm(F.layer_norm(x * 2, (16,)) * 3, (8, 16)) + 1, torch.randn(2, 8, 16)
    )
    assert [region.reduced for region in found] == [1, 2]


def test_what_two_regions_read_of_another_shape_is_made_outside(tools):
    """The first cannot store it; it keeps its own nodes all the same."""

    def f(x, w, s):
        scale = s.exp() * 0.5
        y = F.linear((x * 2 + scale).relu(), w)
        return (y.relu() + 1) * scale

    _, found = regions(tools, f, X, W, B)
    assert [region.name for region in found] == ["fused_exp_mul", "fused_mul_add_relu", "fused_relu_add_mul"]


def test_a_result_of_fewer_dimensions_is_stored(tools):
    _, (region,) = regions(tools, lambda x: (x * 2).sum(-1), X)
    assert [node.name for node in region.outputs] == ["sum_1"] and region.shape == (8, 16)


def test_a_lone_node_moves_to_its_reader(tools):
    """It is far below: nothing between depends on it."""

    def f(x, w, s):
        gate = s.sigmoid()
        return F.linear(F.linear(x, w), w).relu() * gate

    _, (region,) = regions(tools, f, X, W, B)
    assert "sigmoid" in {node.name for node in region.nodes}


def test_without_shapes(tools):
    _, (region,) = regions(tools, lambda x, w: F.linear(x, w).relu() + 1, X, W, known=False)
    assert region.shape is None and region.name == "fused_relu_add"


def test_nothing_that_is_written_to(tools):
    def f(x, w):
        y = x * 2 + 1
        z = y.view(-1)
        z.add_(1)
        return y.relu() * 3

    _, found = regions(tools, f, X, W)
    assert names(found) == []


def test_an_argument_may_be_a_view_of_another(tools):
    def f(x, y):
        before = y.relu() + 1
        x.add_(1)
        return before * (y * 2)

    _, found = regions(tools, f, X, X)
    assert not {"relu", "mul"} & {node.name for region in found for node in region.nodes}


def test_not_across_a_call_that_nobody_knows(tools):
    """It may write to memory, or switch gradients off."""

    gm = tools.traced(lambda x: ((x * 2 + 1).relu() * 3) + x, X)
    relu = next(node for node in gm.graph.nodes if node.name == "relu")
    with gm.graph.inserting_before(relu):
        gm.graph.call_function(torch._C._set_grad_enabled, (False,)).meta["dtype"] = "-"
    gm = tools.rewritten(gm, tools.context(), until="fold_casts")
    found = find_regions(gm.graph, order_of_effects(gm.graph))
    assert names(found) == [["mul", "add"], ["relu", "mul_1", "add_1"]]


def test_dead_nodes_are_no_region(tools):
    _, found = regions(tools, lambda x, w: ((x.relu() + 1) * 2, F.linear(x, w))[1], X, W)
    assert found == []


def test_what_may_be_its_argument_itself_is_not_stored(tools):
    """A copy would be traffic, and no view of the argument."""
    _, found = regions(tools, lambda x, w: (x.contiguous(), F.linear(x.contiguous().relu() + 1, w)), X, W)
    assert all(node.meta["op"].name != "contiguous" for region in found for node in region.outputs)
    _, (region,) = regions(tools, lambda x, w: (F.dropout(x, 0.5, False), F.relu(x) + 1), X, W)
    assert names([region]) == [["relu", "add"]]

    def residual(x, w):
        y = F.dropout(x, 0.5, False)
        return y, F.linear(F.relu(y) + 1, w)

    _, (region,) = regions(tools, residual, X, W)
    assert names([region])[0][:2] == ["relu", "add"]


def test_at_most_64_nodes(tools):
    def f(x):
        for _ in range(100):
            x = x + 1
        return x

    _, found = regions(tools, f, X)
    assert [len(region.nodes) for region in found] == [64, 36]


def test_what_could_join_either_of_two_regions_joins_none(tools):
    """Else each of both would read what is in the other."""

    def f(x):
        a, b = F.layer_norm(x, (16,)), F.layer_norm(x, (8, 16))
        c, d = (a + b) * b, (a - b) * a
        return F.softmax(c, -1), F.softmax(d, -1)

    _, found = regions(tools, f, torch.randn(2, 8, 16))
    assert names(found) == [["add", "mul", "softmax"], ["sub", "mul_1", "softmax_1"]]


def test_names_hold_at_most_five_ops(tools):
    _, (region,) = regions(tools, lambda x: ((((x + 1) * 2).relu() - 3).tanh()).sigmoid().abs(), X)
    assert region.name == "fused_add_mul_relu_sub_tanh_more"


def with_sizes_that_vary(gm: GraphModule, *inputs: Tensor) -> None:
    """What a compiler that does not know the first size of the first input writes down."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    sizes = StatelessSymbolicContext([DimDynamic.DYNAMIC, *[DimDynamic.STATIC] * (inputs[0].dim() - 1)])
    fakes = [mode.from_tensor(inputs[0], symbolic_context=sizes), *map(mode.from_tensor, inputs[1:])]
    FakeTensorProp(gm, mode).propagate_dont_convert_inputs(*fakes)


def test_a_size_that_varies_parts_nothing(tools):
    """The bias has a known shape, and is no measure for what it is added to."""

    def f(x, w, b):
        return F.linear(F.gelu(F.linear(x, w) + b.sigmoid()) * 2, w) + x.sum(0)

    gm, (before,) = regions(tools, f, X, W, B)
    with_sizes_that_vary(gm, X, W, B)
    (region,) = [each for each in find_regions(gm.graph, order_of_effects(gm.graph)) if len(each.nodes) > 2]
    assert names([region]) == names([before])
    symbol, columns = region.shape
    assert isinstance(symbol, str) and columns == 16
