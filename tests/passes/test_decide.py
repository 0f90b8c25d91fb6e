"""decide: what every node reads, computes and puts out at every level, and where casts come to lie."""

from __future__ import annotations

import operator
import sys

import expecttest
import pytest
import torch
import torch._higher_order_ops.wrap
import torch.nn.functional as F
from torch import nn
from torch.fx import Graph, GraphModule

from fxprec.passes.decide import decide
from fxprec.passes.graph.annotations import UNKNOWN, Arrival, Precision, Rule
from fxprec.passes.graph.casts import CASTS
from fxprec.passes.graph.text import format_graph
from fxprec.passes.policy.policy import Policy

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16


@pytest.fixture
def decided(tools):
    """Trace a function, decide it, and give node name -> Precision (and the graph)."""

    def run(function, *inputs, level="O1", **settings):
        gm = tools.traced(function, *inputs)
        tools.rewritten(gm, tools.context(level, **settings), until="decide")
        return {node.name: node.meta["precision"] for node in gm.graph.nodes}, gm

    return run


@pytest.fixture
def casts(tools):
    """How many casts of activations the rewritten graph holds, and of how many elements."""

    def count(function, *inputs, level="O1", **settings):
        gm = tools.rewritten(tools.traced(function, *inputs), tools.context(level, **settings))
        found = [node for node in gm.graph.nodes if node.target in CASTS and node.args[0].op != "get_attr"]
        return len(found), sum(node.meta["numel"] for node in found)

    return count


class PreNorm(nn.Module):
    """The graph of a pre-LN transformer: one head, no biases."""

    def __init__(self, layers: int, width: int = 8) -> None:
        super().__init__()
        self.layers, self.width = layers, width
        self.table = nn.Parameter(torch.randn(11, width))
        self.gain = nn.Parameter(torch.ones(width))
        self.weights = nn.ParameterList([torch.randn(width, width) / 8 for _ in range(4 * layers)])

    def forward(self, ids):
        x = F.embedding(ids, self.table)
        for layer in range(self.layers):
            qkv, out, up, down = self.weights[4 * layer : 4 * layer + 4]
            y = F.linear(F.layer_norm(x, (self.width,), self.gain), qkv)
            y = F.scaled_dot_product_attention(y, y, y)
            x = x + F.linear(y, out)
            y = F.gelu(F.linear(F.layer_norm(x, (self.width,), self.gain), up))
            x = x + F.linear(y, down)
        return x


IDS = torch.arange(6).view(1, 6)


@pytest.mark.slow
def test_the_annotations(decided):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.randn(4, 4))

        def forward(self, x):
            return torch.exp(torch.relu(F.linear(x, self.w)))

    found, gm = decided(Model(), torch.randn(2, 4))
    expecttest.assert_expected_inline(
        "\n".join(
            f"{node.name}: {p.reads} {p.compute} {p.output} {p.rule}".replace("torch.", "")
            for node in gm.graph.nodes
            for p in [found[node.name]]
        ),
        """\
x: as it arrives None float32 keep
w: as it arrives None float32 keep
linear: bfloat16 bfloat16 bfloat16 low
relu: bfloat16 bfloat16 bfloat16 follow
exp: float32 float32 float32 full
output: its original dtype None None keep""",
    )
    assert all(precision.why for precision in found.values())


def test_a_second_decision_replaces_the_first(tools):
    gm = tools.traced(PreNorm(1), IDS)
    tools.rewritten(gm, tools.context("O2"), until="decide")
    tools.rewritten(gm, tools.context("O1"), until="decide")
    again = format_graph(gm)
    fresh = tools.traced(PreNorm(1), IDS)
    assert again == format_graph(tools.rewritten(fresh, tools.context("O1"), until="decide"))


def test_the_residual_stream_is_fp32_at_o1_and_low_at_o2(decided):
    for level, expected in (("O1", FP32), ("O2", BF16), ("O3", BF16)):
        found, gm = decided(PreNorm(12), IDS, level=level)
        cast = {node.name: node.meta["stored_dtype"] for node in gm.graph.nodes if "stored_dtype" in node.meta}
        streams = {cast.get(name, p.output) for name, p in found.items() if name.startswith(("add", "embedding"))}
        assert streams == {expected}, level
        assert {p.reads for name, p in found.items() if name.startswith("linear")} == {BF16}
        norms = {(p.reads, p.compute, p.output) for name, p in found.items() if name.startswith("layer_norm")}
        assert norms == {(expected, BF16 if level == "O3" else FP32, expected)}


@pytest.mark.slow
def test_casts_of_a_twelve_layer_transformer(casts):
    model = PreNorm(12)
    assert casts(model, IDS, level="O1") == (24, 24 * 48)  # behind every norm
    assert casts(model, IDS, level="O2") == (2, 96)  # of the lookup, and the output
    assert casts(model, IDS, level="O2", keep_output_dtype=False) == (1, 48)  # of the lookup
    # without mixed kernels every norm reads FP32: an FP32 stream needs one cast a norm, a low one two
    assert casts(model, IDS, level="O2", native_mixed=False)[0] == 24


def test_o0_changes_nothing(decided, casts):
    found, _ = decided(PreNorm(2), IDS, level="O0")
    assert {p.rule for p in found.values()} == {Rule.KEEP}
    assert {p.reads for p in found.values()} == {Arrival.AS_IT_ARRIVES, Arrival.ORIGINAL}
    assert {p.output for p in found.values()} == {FP32, None}
    assert casts(PreNorm(2), IDS, level="O0") == (0, 0)


def test_o3_lowers_what_is_full(decided):
    def f(x):
        return torch.softmax(torch.exp(x), -1).sum()

    found, _ = decided(f, torch.randn(2, 4), level="O3")
    assert found["exp"] == Precision(BF16, BF16, BF16, Rule.LOW, found["exp"].why)
    assert found["softmax"].output is found["sum_1"].output is BF16


def test_a_small_tensor_is_cast_before_it_grows(casts, decided):
    def f(x, w):
        return F.conv2d(torch._C._nn.upsample_nearest2d(x, None, [4.0, 4.0]), w)

    inputs = (torch.randn(1, 1, 4, 4), torch.randn(1, 1, 3, 3))
    found, _ = decided(f, *inputs)
    assert found["upsample_nearest2d"].output is BF16
    assert casts(f, *inputs)[1] == 16 + 9 + 196  # x, w, and the result

    def wide(x, w):
        up = torch._C._nn.upsample_nearest2d(x, None, [4.0, 4.0])
        return F.conv2d(up, w), up.exp()

    found, _ = decided(wide, *inputs)
    assert found["upsample_nearest2d"].output is FP32, "one reader that is not low, and rounding early would lose"


def test_sums_are_not_rounded_early(decided):
    """(x - mean) of rounded operands has lost its digits, whoever reads it."""

    def f(x, mean, w):
        return F.linear(torch.relu(x - mean), w)

    found, _ = decided(f, torch.randn(2, 4), torch.randn(4), torch.randn(4, 4))
    assert found["sub"].reads is FP32

    def grown(x, w):
        return F.conv2d(torch._C._nn.upsample_nearest2d(x, None, [4.0, 4.0]) - 0.5, w)

    found, _ = decided(grown, torch.randn(1, 1, 4, 4), torch.randn(1, 1, 3, 3))
    assert found["upsample_nearest2d"].output is found["sub"].reads is FP32


def test_a_parameter_is_lowered_for_nothing(decided):
    """Its shadow is there already; any other tensor is cast where it is smallest."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.w = nn.Parameter(torch.randn(99, 4)), nn.Parameter(torch.randn(4, 4))
            self.register_buffer("fixed", torch.randn(99, 4))

        def forward(self, ids):
            return F.linear(self.table.index_select(0, ids), self.w), F.linear(self.fixed.index_select(0, ids), self.w)

    found, _ = decided(Model(), torch.arange(3))
    assert (found["index_select"].output, found["index_select_1"].output) == (BF16, FP32)


def test_a_low_stem_makes_a_low_residual_net(casts, decided):
    def net(x, w):
        x = F.conv2d(x, w, padding=1)
        for _ in range(8):
            x = torch.relu(x + F.conv2d(x, w, padding=1))
        return x

    found, _ = decided(net, torch.randn(1, 2, 4, 4), torch.randn(2, 2, 3, 3))
    assert {p.output for name, p in found.items() if name.startswith(("relu", "add"))} == {BF16}
    assert casts(net, torch.randn(1, 2, 4, 4), torch.randn(2, 2, 3, 3))[0] == 5  # x, w for each four, the result


def test_user_casts_are_obeyed(decided):
    def f(x, w):
        y = F.linear(x, w)
        wide = y.float() * 2.0
        narrow = wide.to(torch.bfloat16) + 1.0
        return wide, narrow, x.half(), y.double()

    found, _ = decided(f, torch.randn(2, 4), torch.randn(4, 4))
    assert found["float_1"] == Precision.arriving(FP32, FP32, Rule.KEEP, found["float_1"].why)
    assert found["mul"].reads is FP32
    assert found["to"].output is found["add"].reads is BF16
    assert found["half"].output is FP16, "a dtype that is neither FP32 nor low"
    assert found["double"].output is torch.float64


def test_a_cast_to_another_tensors_dtype_follows_that_tensor(decided):
    def f(x, w):
        low = F.linear(x, w)
        wide = torch.exp(low)
        return (
            wide.to(low.dtype),
            wide.type_as(low),
            low.to(wide.dtype),
            torch.zeros(3, dtype=low.dtype),
            wide.to("cpu"),
        )

    found, _ = decided(f, torch.randn(2, 4), torch.randn(4, 4))
    assert [found[name].output for name in ("to", "type_as", "to_1", "zeros", "to_2")] == [BF16, BF16, FP32, BF16, FP32]


def test_values_that_were_low_stay_low(decided):
    def f(x, w):
        half = x.half()
        return torch.relu(half + 1.0), F.linear(half, w.half()), torch.softmax(half, -1) * 2.0

    found, _ = decided(f, torch.randn(2, 4), torch.randn(4, 4), low=FP16)
    assert found["add"].reads is found["relu"].output is FP16
    assert found["softmax"].reads is FP32
    assert found["mul"].reads is FP16, "the program multiplies in float16"
    found, _ = decided(f, torch.randn(2, 4), torch.randn(4, 4), low=BF16)
    assert found["add"].reads is FP32, "float16 beside bfloat16 is on the FP32 side"


def test_several_results_share_one_dtype(decided, tools):
    def f(x, w):
        a, b = F.linear(x, w).chunk(2, -1)
        top, at = torch.max(a, dim=-1)
        return a + top[..., None], b.exp(), at

    found, _ = decided(f, torch.randn(65536, 4), torch.randn(4, 4))  # FP32 traffic outweighs one cast more
    assert found["chunk"].output is found["getitem"].output is found["getitem_1"].output is BF16
    assert found["max_1"].output is found["getitem_2"].output is BF16
    assert found["getitem_3"].output is None
    assert found["exp"].reads is FP32


def test_a_tuple_that_nobody_takes_apart_cannot_be_cast(decided):
    found, _ = decided(lambda x, w: F.linear(x, w).chunk(2, -1), torch.randn(2, 4), torch.randn(4, 4))
    assert found["chunk"].reads is FP32, "it is returned as it is, and the module returns FP32"
    wide = Policy().override(ops={"cat": FP32})
    inputs = (torch.randn(2, 4), torch.randn(4, 4))
    found, _ = decided(lambda x, w: torch.cat(F.linear(x, w).chunk(2, -1)), *inputs, policy=wide)
    assert found["chunk"].output is found["cat"].reads is FP32


def test_sums_read_low_and_put_out_fp32(decided):
    def f(x, w):
        y = F.linear(x, w)
        return y.sum(-1), y.mean(), torch.softmax(y, -1, dtype=torch.float32), y.sum(dtype=torch.bfloat16)

    found, _ = decided(f, torch.randn(2, 4), torch.randn(4, 4))
    for name in ("sum_1", "mean", "softmax"):
        assert (found[name].reads, found[name].compute, found[name].output) == (BF16, FP32, FP32), name
    assert found["sum_2"].output is BF16
    found, _ = decided(f, torch.randn(2, 4), torch.randn(4, 4), native_mixed=False)
    assert {found[name].reads for name in ("sum_1", "mean", "softmax", "sum_2")} == {FP32}
    found, _ = decided(lambda x: x.sum(-1), torch.randn(2, 4))
    assert found["sum_1"].reads is FP32, "an FP32 input is not rounded first"


def test_unknown_ops_keep_their_dtypes(decided):
    def f(x, w):
        y = F.linear(x, w)
        return torch.linalg.inv(y), torch.fft.rfft(y), y.size(0)

    found, _ = decided(f, torch.randn(4, 4), torch.randn(4, 4))
    assert (found["linalg_inv"].reads, found["linalg_inv"].rule, found["linalg_inv"].output) == (
        Arrival.ORIGINAL,
        Rule.KEEP,
        FP32,
    )
    assert found["fft_rfft"].output is None
    assert found["size"].rule is Rule.FOLLOW, "a shape may be read off any dtype"


def test_a_region_without_autocast_is_kept(decided, tools):
    gm = tools.traced(lambda x, w: torch.exp(F.linear(x, w)), torch.randn(2, 4), torch.randn(4, 4))
    for node in gm.graph.nodes:
        if node.name == "linear":
            node.meta["autocast"] = False
    tools.rewritten(gm, tools.context(), until="decide")
    linear = next(node for node in gm.graph.nodes if node.name == "linear").meta["precision"]
    assert (linear.reads, linear.output, linear.rule) == (Arrival.ORIGINAL, FP32, Rule.KEEP)


def test_a_norm_between_products_reads_low(decided):
    """Its FP32 weight is not data: it widens nothing."""

    def f(x, w, gain):
        return F.linear(F.layer_norm(F.linear(x, w), (4,), gain), w)

    found, _ = decided(f, torch.randn(2, 4), torch.randn(4, 4), torch.ones(4))
    norm = found["layer_norm"]
    assert (norm.reads, norm.compute, norm.output, norm.rule) == (BF16, FP32, BF16, Rule.FULL)
    found, _ = decided(f, torch.randn(2, 4), torch.randn(4, 4), torch.ones(4), device="cuda")
    assert found["layer_norm"].reads is FP32, "no such kernel there"


def test_integers_and_float64_are_untouched(decided):
    def f(ids, x):
        return ids + 1, x * 2.0, ids > 2, torch.where(ids > 2, x, x)

    found, _ = decided(f, torch.arange(4), torch.randn(4, dtype=torch.float64), level="O2")
    assert found["add"].output is found["gt"].output is None
    assert found["mul"].output is found["where"].output is torch.float64
    assert all(isinstance(p.reads, Arrival) for p in found.values())


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_float64_computes_in_float64_whatever_the_rule(decided, level):
    def f(x):
        return torch.exp(x), x @ x, x.float() @ x.float()

    found, _ = decided(f, torch.randn(4, 4, dtype=torch.float64), level=level)
    computes = {name: precision.compute for name, precision in found.items() if name.startswith(("exp", "matmul"))}
    assert computes == {"exp": torch.float64, "matmul": torch.float64, "matmul_1": BF16}


def test_comparisons_read_what_arrives(casts):
    assert casts(lambda x, w: F.linear(x, w) > 0.5, torch.randn(2, 4), torch.randn(4, 4))[0] == 2


def test_a_zero_dim_tensor_widens_nobody(decided):
    def f(x, w, scale, vector):
        return F.linear(F.linear(x, w) * scale, w), F.linear(F.linear(x, w) * vector, w), scale * 2.0

    found, _ = decided(f, torch.randn(2, 4), torch.randn(4, 4), torch.tensor(2.0), torch.tensor([2.0]))
    assert found["mul"].output is BF16
    assert found["mul_1"].output is FP32
    assert found["mul_2"].output is FP32


def test_inputs_of_unknown_dtype(decided):
    def f(x, batch, w):
        return F.linear(x, w), torch.exp(batch["a"] * 2.0)

    found, gm = decided(f, level="O2")
    assert {node.meta["dtype"] for node in gm.graph.nodes if node.op == "placeholder"} == {UNKNOWN}
    assert found["linear"].reads is BF16
    assert found["getitem"].output is FP32, "batch may be a dict: only what is taken from it can be cast"
    assert found["exp"].reads is FP32


def test_inputs_count_as_low_at_o2(decided):
    def f(x, y, w):
        return torch.relu(x + y) @ w

    inputs = (torch.randn(4, 4),) * 3
    found, _ = decided(f, *inputs, level="O2")
    assert found["x"].output is FP32, "as it arrives"
    assert found["add"].reads is BF16
    found, _ = decided(f, *inputs, level="O1")
    assert found["add"].reads is FP32


def test_policies_are_asked(decided):
    def f(x, w):
        return torch.relu(torch.softmax(F.linear(x, w), -1))

    inputs = (torch.randn(2, 4), torch.randn(4, 4))
    found, _ = decided(f, *inputs, policy=Policy().override(ops={"linear": torch.float32, "softmax": "low"}))
    assert (found["linear"].reads, found["linear"].rule) == (FP32, Rule.FULL)
    assert found["softmax"].output is BF16
    assert "override" in found["linear"].why
    found, _ = decided(f, *inputs, policy=Policy().override(nodes={"relu": torch.float16}))
    assert (found["relu"].reads, found["relu"].output) == (FP16, FP16)


def test_the_same_every_time(decided):
    first = decided(PreNorm(3), IDS)[0]
    assert first == decided(PreNorm(3), IDS)[0]


def region(kind: str, function, *inputs) -> GraphModule:
    """``f(x, w) = kind(body, x, w)[0]``, the way dynamo captures a checkpointed region."""
    body = torch.fx.symbolic_trace(function)
    for node in body.graph.nodes:
        if node.op == "output":
            node.args = ((node.args[0],),) if isinstance(node.args[0], torch.fx.Node) else node.args
    root = nn.Module()
    root.body = GraphModule(body, body.graph)
    graph = Graph()
    given = [graph.placeholder(f"x{i}") for i in range(len(inputs))]
    for node, value in zip(given, inputs, strict=True):
        node.meta["dtype"], node.meta["val"] = value.dtype, value
    call = graph.call_function(getattr(torch.ops.higher_order, kind), (graph.get_attr("body"), *given))
    out = graph.call_function(operator.getitem, (call, 0))
    graph.output(graph.call_function(torch.relu, (out,)))
    return GraphModule(root, graph)


def test_a_checkpointed_region_has_no_casts_at_its_border(tools):
    gm = region(
        "tag_activation_checkpoint", lambda x, w: torch.relu(F.linear(x, w)), torch.randn(2, 4), torch.randn(4, 4)
    )
    tools.rewritten(gm, tools.context(), until="decide")
    inner = {node.name: node.meta["precision"] for node in gm.body.graph.nodes}
    outer = {node.name: node.meta["precision"] for node in gm.graph.nodes}
    assert inner["linear"].reads is inner["relu"].output is BF16
    assert inner["output"].rule is Rule.FOLLOW
    assert outer["getitem"].output is outer["relu"].reads is BF16


@pytest.mark.parametrize("keep", [True, False])
def test_branches_take_and_give_original_dtypes(tools, keep):
    gm = region("wrap", lambda x, w: F.linear(x, w), torch.randn(2, 4), torch.randn(4, 4))
    call = next(node for node in gm.graph.nodes if node.name == "wrap")
    gm.register_buffer("flag", torch.tensor(True))
    pred = gm.graph.get_attr("flag")
    call.prepend(pred)
    body, *given = call.args
    call.target, call.args = torch.ops.higher_order.cond, (pred, body, body, tuple(given))
    tools.rewritten(gm, tools.context(keep_output_dtype=keep), until="insert_casts")
    inner = {node.name: node.meta["precision"] for node in gm.body.graph.nodes}
    outer = {node.name: node.meta["precision"] for node in gm.graph.nodes}
    assert inner["linear"].reads is BF16
    assert inner["output"].rule is outer["wrap"].rule is Rule.KEEP
    assert outer["getitem"].output is FP32
    (returned,) = gm.body.graph.output_node().all_input_nodes
    assert returned.meta["precision"].output is FP32


def test_a_body_called_twice_keeps_its_border(tools):
    gm = region("wrap", lambda x, w: F.linear(x, w), torch.randn(4, 4), torch.randn(4, 4))
    call = next(node for node in gm.graph.nodes if node.name == "wrap")
    first = next(node for node in gm.graph.nodes if node.name == "getitem")
    with gm.graph.inserting_after(first):
        second = gm.graph.call_function(call.target, (call.args[0], first, call.args[2]))
    first.replace_all_uses_with(second, delete_user_cb=lambda user: user is not second)
    with gm.graph.inserting_after(second):
        part = gm.graph.call_function(operator.getitem, (second, 0))
    second.replace_all_uses_with(part, delete_user_cb=lambda user: user is not part)
    tools.rewritten(gm, tools.context(), until="decide")
    outer = {node.name: node.meta["precision"] for node in gm.graph.nodes}
    assert outer["getitem"].output is outer["getitem_1"].output is FP32
    inner = {node.name: node.meta["precision"] for node in gm.body.graph.nodes}
    assert inner["linear"].reads is BF16


def test_the_body_of_an_op_that_computes_with_it_is_left_alone(tools):
    gm = region("wrap", lambda x, w: F.linear(x, w), torch.randn(2, 4), torch.randn(4, 4))
    call = next(node for node in gm.graph.nodes if node.name == "wrap")
    call.target = torch.ops.higher_order.autograd_function_apply
    tools.rewritten(gm, tools.context(), until="decide")
    inner = {node.name: node.meta["precision"] for node in gm.body.graph.nodes}
    assert {p.rule for p in inner.values()} == {Rule.KEEP}
    assert inner["linear"].output is FP32


def calls_to_decide(tools, nodes, level, placement):
    """How many functions, of Python's and built in, deciding a residual network of so many nodes calls."""
    graph = Graph()
    x = graph.placeholder("x")
    x.meta["dtype"] = FP32
    w = graph.get_attr("w")
    while len(graph.nodes) < nodes:
        low = graph.call_function(F.linear, (graph.call_function(F.layer_norm, (x, (4,))), w))
        wide = graph.call_function(torch.mul, (low, graph.call_function(torch.softmax, (x, -1))))
        x = graph.call_function(torch.add, (x, wide))
    graph.output(x)
    root = nn.Module()
    root.w = nn.Parameter(torch.zeros(4, 4))
    gm = GraphModule(root, graph)
    context = tools.context(level, placement=placement)
    tools.rewritten(gm, context, until="propagate")
    calls = 0

    def count(frame, event, argument):
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        decide(gm, context)
    finally:
        sys.setprofile(None)
    assert all("precision" in node.meta for node in gm.graph.nodes)
    return calls


@pytest.mark.slow
@pytest.mark.parametrize("placement", ["mincut", "autocast"])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_the_work_grows_with_the_nodes(tools, placement, level):
    """Linear, and about 10 us a node: `python -m benchmarks.convert` times it (10,000 nodes: 0.3 s of 2 s allowed)."""
    few, many = (calls_to_decide(tools, nodes, level, placement) for nodes in (500, 2_000))
    assert many < 4.2 * few
    assert many < 400 * 2_000
