"""Original dtypes and sizes of every node: against real execution, and rule by rule."""

import math
import operator
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Node, Tracer, symbolic_trace
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_flatten, tree_map

import fxprec
from fxprec.passes.canonicalize import canonicalize
from fxprec.passes.context import Context
from fxprec.passes.graph.annotations import NON_TENSOR, UNKNOWN, DTypeInfo
from fxprec.passes.graph.text import format_graph
from fxprec.passes.ops.names import canonical_name, canonical_op
from fxprec.passes.ops.table import row_of
from fxprec.passes.policy.policy import Policy
from fxprec.passes.propagate import propagate

CONTEXT = Context(low=torch.bfloat16, policy=Policy.preset("O1"))

#: Ops whose result only a fake value can tell: they stay unknown without one.
ASK_FAKE = {"stft", "istft", "lu", "torch._scaled_mm", "histogramdd", "bincount", "hash_tensor"}


def annotated(gm: GraphModule) -> GraphModule:
    """The graph after canonicalize and propagate."""
    canonicalize(gm, CONTEXT)
    propagate(gm, CONTEXT)
    return gm


def dtypes_of(value: Any) -> DTypeInfo:
    if isinstance(value, Tensor):
        return value.dtype
    if isinstance(value, tuple | list) and not isinstance(value, torch.Size):
        return tuple(map(dtypes_of, value))
    return NON_TENSOR


def one_call(target: Any, kind: str, args: Any, kwargs: Any, fake: FakeTensorMode | None = None) -> Node:
    """A graph of one call on placeholders of the dtypes of ``args``; 0-dim tensors are known to be such."""
    graph = Graph()

    def placeholder(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        node = graph.placeholder(f"x{len(graph.nodes)}")
        node.meta["dtype"] = leaf.dtype
        if fake is not None:
            node.meta["val"] = fake.from_tensor(leaf)
        elif leaf.dim() == 0:
            node.meta["val"] = torch.empty((), dtype=leaf.dtype, device="meta")
        return node

    args, kwargs = tree_map(placeholder, (tuple(args), dict(kwargs)))
    node = graph.create_node(kind, target, args, kwargs)
    node.meta["op"] = canonical_op(node)
    graph.output(node)
    return node


def spellings(info: Any) -> Iterator[tuple[Any, str]]:
    """The public function, or the method, and both where there are both."""
    found: Any = torch
    for part in info.name.split("."):
        found = getattr(found, part, None)
    is_function = callable(found) and canonical_name(found, "call_function") is not None
    if is_function:
        yield found, "call_function"
    name = getattr(info.method_variant, "__name__", info.name)
    if callable(getattr(Tensor, name, None)) and (info.method_variant is not None or not is_function):
        yield name, "call_method"


def agree(got: DTypeInfo, want: DTypeInfo) -> bool:
    """A list of unknown length is a tuple of one dtype."""
    one_for_all = isinstance(got, tuple) and len(got) == 1 and isinstance(want, tuple) and set(want) == set(got)
    return got == want or one_for_all


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64], ids=str)
def test_dtypes_are_those_of_real_execution(dtype: torch.dtype) -> None:
    """Every op of torch's own op tests, in every spelling: the table's answer against the eager result."""
    checked, wrong = set(), set()
    for info in op_db:
        if dtype not in info.dtypes:
            continue
        for _, sample in zip(range(3), info.sample_inputs_func(info, "cpu", dtype, requires_grad=False), strict=False):
            args = (sample.input, *sample.args)
            if sum(leaf.numel() for leaf in tree_flatten((args, sample.kwargs))[0] if isinstance(leaf, Tensor)) > 5000:
                continue
            try:
                want = dtypes_of(info.op(*args, **sample.kwargs))
            except Exception:  # the sample is for another device
                continue
            if (info.name, dtype) == ("square", torch.bool):
                continue  # x ** 2 of bool is int64: no kind of result for this one op
            for target, kind in spellings(info):
                node = one_call(target, kind, args, sample.kwargs)
                op = node.meta["op"]
                if op is None or row_of(op.name) is None or info.name in ASK_FAKE:
                    continue
                propagate(GraphModule({}, node.graph), CONTEXT)
                checked.add(op.name)
                if not agree(node.meta["dtype"], want) and info.variant_test_name != "grad_oriented":
                    wrong.add((info.name, info.variant_test_name, kind, str(node.meta["dtype"]), str(want)))
    assert len(checked) > (450 if dtype is torch.float32 else 150)
    assert wrong == set()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["stft", "bincount", "hash_tensor", "nn.functional.linear", "topk"])
def test_fake_values_tell_what_the_table_does_not(name: str) -> None:
    info = next(info for info in op_db if info.name == name)
    sample = next(iter(info.sample_inputs_func(info, "cpu", sorted(info.dtypes, key=str)[-1], requires_grad=False)))
    args = (sample.input, *sample.args)
    want = info.op(*args, **sample.kwargs)
    target, kind = next(spellings(info))
    fake = FakeTensorMode()
    node = one_call(target, kind, args, sample.kwargs, fake)
    node.meta["val"] = tree_map(lambda leaf: fake.from_tensor(leaf) if isinstance(leaf, Tensor) else leaf, want)
    propagate(GraphModule({}, node.graph), CONTEXT)
    assert node.meta["dtype"] == dtypes_of(want)
    assert node.meta["numel"] == (tuple(r.numel() for r in want) if isinstance(want, tuple) else want.numel())


def traced(module: nn.Module) -> GraphModule:
    """Symbolically traced, buffers as get_attr nodes."""
    tracer = Tracer()
    tracer.proxy_buffer_attributes = True
    return GraphModule(module, tracer.trace(module))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Parameter(torch.zeros(12, 4))
        self.bias = nn.Buffer(torch.ones(1, 1, 8, 8, dtype=torch.bool))
        self.table = nn.Buffer(torch.zeros(4, dtype=torch.float64))

    def forward(self, x: Tensor, ids: Tensor) -> Any:
        n = x.size(1)
        q, k, v = F.linear(x, self.qkv).chunk(3, -1)
        scores = (q @ k.mT) * n**-0.5
        scores = scores.masked_fill(self.bias[..., :n] == 0, float("-inf"))
        best, where = scores.softmax(-1).max(-1)
        top = torch.topk(scores, 2)
        positions = torch.arange(n)
        return best, where, (v + 1).to(x.dtype), top.indices, positions * 2, positions / 2, v + self.table, ids + n


def test_a_graph_without_shapes() -> None:
    gm = traced(Attention())
    gm.graph.find_nodes(op="placeholder")[1].meta["dtype"] = torch.int64
    annotated(gm)
    assert_expected_inline(
        format_graph(gm),
        """\
%x: unknown = placeholder
%ids: int64 = placeholder
%size: - = size(%x, 1)
%qkv: float32 = get_attr[qkv]
%linear: float32 = linear(%x, %qkv)
%chunk: (float32) = chunk(%linear, 3, -1)
%getitem: float32 = getitem(%chunk, 0)
%getitem_1: float32 = getitem(%chunk, 1)
%getitem_2: float32 = getitem(%chunk, 2)
%getattr_1: float32 = getattr(%getitem_1, 'mT')
%matmul: float32 = matmul(%getitem, %getattr_1)
%pow_1: - = pow(%size, -0.5)
%mul: float32 = mul(%matmul, %pow_1)
%bias: bool = get_attr[bias]
%getitem_3: bool = getitem(%bias, (Ellipsis, slice(None, size, None)))
%eq: bool = eq(%getitem_3, 0)
%masked_fill: float32 = masked_fill(%mul, %eq, -inf)
%softmax: float32 = softmax(%masked_fill, -1)
%max_1: (float32, int64) = max(%softmax, -1)
%getitem_4: float32 = getitem(%max_1, 0)
%getitem_5: int64 = getitem(%max_1, 1)
%topk: (float32, int64) = topk(%masked_fill, 2)
%arange: int64 = arange(%size)
%add: float32 = add(%getitem_2, 1)
%getattr_2: - = getattr(%x, 'dtype')
%to: unknown = to(%add, %getattr_2)
%mul_1: int64 = mul(%arange, 2)
%truediv: float32 = div(%arange, 2)
%table: float64 = get_attr[table]
%add_1: float64 = add(%getitem_2, %table)
%add_2: int64 = add(%ids, %size)
%getattr_3: int64 = getattr(%topk, 'indices')
return (%getitem_4, %getitem_5, %to, %getattr_3, %mul_1, %truediv, %add_1, %add_2)""",
    )


def result(function: Callable[..., Any], *dtypes: DTypeInfo) -> DTypeInfo:
    """What propagate says that a traced function of tensors of these dtypes returns."""
    gm = symbolic_trace(function)
    for node, dtype in zip(gm.graph.find_nodes(op="placeholder"), dtypes, strict=True):
        node.meta["dtype"] = dtype
    annotated(gm)
    returned = gm.graph.output_node().args[0]
    assert isinstance(returned, Node)
    return returned.meta["dtype"]


INT, FP32, BF16 = torch.int64, torch.float32, torch.bfloat16


@pytest.mark.parametrize(
    ("function", "dtypes", "want"),
    [
        (lambda x: x + 1, (INT,), INT),
        (lambda x: x + 1.0, (INT,), FP32),
        (lambda x: x / x.size(0), (INT,), FP32),
        (lambda x: x * (x.size(0) / 2), (INT,), FP32),
        (lambda x: x * math.sqrt(x.size(0)), (INT,), FP32),
        (lambda x: x * (x.size(0) // 2), (INT,), INT),
        (lambda x, y: x * y.sum().item(), (INT, FP32), FP32),
        (lambda x, y: x * y.sum().item(), (INT, INT), INT),
        (lambda x, y: x.type_as(y), (INT, BF16), BF16),
        (lambda x, y: x.to(y), (INT, BF16), BF16),
        (lambda x, y: x.to(y.dtype), (FP32, BF16), BF16),
        (lambda x, y: torch.zeros(3, dtype=y.dtype) + x, (BF16, FP32), FP32),
        (lambda x: x.to("cpu"), (BF16,), BF16),
        (lambda x: x.double().float(), (INT,), FP32),
        (lambda x: torch.softmax(x, 0, dtype=torch.float64), (FP32,), torch.float64),
        (lambda x: x.view(torch.int32), (FP32,), torch.int32),
        (lambda x: x.max(), (BF16,), BF16),
        (lambda x: x.max(0), (BF16,), (BF16, INT)),
        (lambda x: x.max(0).values, (BF16,), BF16),
        (lambda x: x.max(0).indices, (BF16,), INT),
        (lambda x, y: torch.max(x, y), (BF16, FP32), FP32),
        (lambda x: F.max_pool2d(x, 2, return_indices=True)[1], (FP32,), INT),
        (lambda x: F.max_pool2d(x, 2), (FP32,), FP32),
        (lambda x: x.unbind()[5], (BF16,), BF16),
        (lambda x: torch.cat(x.split(2)[1:]), (BF16,), BF16),
        (lambda x: x.T.real, (torch.complex64,), FP32),
        (lambda x: x.shape[0] + 1, (FP32,), NON_TENSOR),
        (lambda x: x > 0, (FP32,), torch.bool),
        (lambda x: torch.where(x)[0], (torch.bool,), INT),
        (lambda x, y: torch.where(x, y, 0.0), (torch.bool, BF16), BF16),
        (lambda x: torch.full((2,), x.size(0)), (FP32,), INT),
        (lambda x: torch.full((2,), 1.5), (FP32,), FP32),
        (lambda x: torch.full((2,), False), (FP32,), torch.bool),
        (lambda x: torch.arange(x.size(0)), (FP32,), INT),
        (lambda x: torch.arange(0, 1, 0.5), (FP32,), FP32),
        (lambda x: torch.div(x, 2, rounding_mode="floor"), (INT,), INT),
        (lambda x: x.unique(return_counts=True), (BF16,), (BF16, INT)),
        (lambda x: torch.relu_(x), (BF16,), BF16),
        (lambda x, y: x.add_(y), (BF16, FP32), BF16),
        (lambda x: x + x, (UNKNOWN,), UNKNOWN),
        (lambda x: x > 0, (UNKNOWN,), torch.bool),
        (lambda x, y: F.linear(x, y), (UNKNOWN, FP32), FP32),
        (lambda x, y: x + y, (UNKNOWN, FP32), UNKNOWN),
        (lambda x, y: x + y, (NON_TENSOR, FP32), FP32),
        (lambda x: torch.nn.functional.dropout(x, 0.5), (INT,), INT),
    ],
)
def test_rules_of_results(function: Callable[..., Any], dtypes: tuple[DTypeInfo, ...], want: DTypeInfo) -> None:
    assert result(function, *dtypes) == want


def test_zero_dim_tensors_do_not_promote_and_one_element_does() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scalar, self.vector = nn.Parameter(torch.tensor(1.0)), nn.Parameter(torch.ones(1))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x * self.scalar, x * self.vector

    gm = symbolic_trace(Scaled())
    gm.graph.find_nodes(op="placeholder")[0].meta["dtype"] = BF16
    annotated(gm)
    scaled, widened = gm.graph.find_nodes(op="call_function", target=operator.mul)
    assert (scaled.meta["dtype"], widened.meta["dtype"]) == (BF16, FP32)


def test_parameters_have_their_dtype_and_size() -> None:
    gm = annotated(traced(Attention()))
    found = {n.target: (n.meta["dtype"], n.meta["numel"]) for n in gm.graph.find_nodes(op="get_attr")}
    assert found == {"qkv": (FP32, 48), "bias": (torch.bool, 64), "table": (torch.float64, 4)}


def captured_under_autocast() -> GraphModule:
    """linear -> an op without a row -> add, with fake values as dynamo records them under autocast."""
    fake = FakeTensorMode()
    graph = Graph()
    x = graph.placeholder("x")
    w = graph.get_attr("weight")
    linear = graph.call_function(F.linear, (x, w))
    other = graph.call_function(torch.ops.aten.hardswish_backward.default, (linear, linear))
    graph.output(graph.call_function(torch.add, (other, linear)))
    x.meta["val"] = fake.from_tensor(torch.zeros(2, 4))
    linear.meta["val"] = other.meta["val"] = fake.from_tensor(torch.zeros(2, 3, dtype=BF16))
    gm = GraphModule({"weight": nn.Parameter(torch.zeros(3, 4))}, graph)
    return gm


def test_values_captured_under_autocast_are_asked_again_in_the_original_dtypes() -> None:
    gm = annotated(captured_under_autocast())
    found = [(node.meta["dtype"], node.meta["numel"]) for node in gm.graph.nodes if node.op == "call_function"]
    assert found == [(FP32, 6), (FP32, 6), (FP32, None)]


def test_the_question_is_asked_without_autocast() -> None:
    with torch.library._scoped_library("fxprec_propagate", "DEF") as library:
        library.define("product(Tensor x, Tensor y) -> Tensor")
        library.impl("product", torch.matmul, "CompositeImplicitAutograd")
        gm = captured_under_autocast()
        node = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.hardswish_backward.default)[0]
        node.target = torch.ops.fxprec_propagate.product.default
        node.args = (node.args[0], gm.graph.find_nodes(op="placeholder")[0])
        for source in node.all_input_nodes:
            source.meta["val"] = source.meta["val"].new_empty(4, 4)
        with torch.autocast("cpu", dtype=BF16):
            annotated(gm)
        assert node.meta["dtype"] is FP32


def test_a_custom_op_without_fake_stays_unknown_where_its_capture_was_low() -> None:
    with torch.library._scoped_library("fxprec_propagate", "DEF") as library:
        library.define("mystery(Tensor x) -> Tensor")
        gm = captured_under_autocast()
        node = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.hardswish_backward.default)[0]
        node.target, node.args = torch.ops.fxprec_propagate.mystery.default, node.args[:1]
        annotated(gm)
        assert node.meta["dtype"] is UNKNOWN


def test_what_follows_an_unknown_value_is_not_taken_for_low_because_it_was_captured_low() -> None:
    gm = captured_under_autocast()
    first = gm.graph.find_nodes(op="placeholder")[0]
    first.meta["val"] = first.meta["val"].to(BF16)  # known only to the capture: the user's own dtype, or autocast's
    first.meta["dtype"] = UNKNOWN
    second = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.hardswish_backward.default)[0]
    second.args = (first, first)
    annotated(gm)
    assert second.meta["dtype"] is UNKNOWN


def test_a_cast_baked_from_a_low_tensor_was_one_to_fp32() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    x.meta["dtype"] = FP32
    cast = graph.call_method("to", (x, BF16))
    literal = graph.call_method("to", (x, BF16))
    cast.meta["names_tensors_dtype"] = True
    graph.output((cast, literal))
    annotated(GraphModule({}, graph))
    assert (cast.meta["dtype"], literal.meta["dtype"]) == (FP32, BF16)


def body(function: Callable[..., Any]) -> GraphModule:
    return symbolic_trace(function)


def higher_order(target: Any, bodies: list[GraphModule], make: Callable[..., tuple[Any, ...]], *dtypes: Any) -> Node:
    graph = Graph()
    inputs = [graph.placeholder(f"x{i}") for i in range(len(dtypes))]
    for node, dtype in zip(inputs, dtypes, strict=True):
        node.meta["dtype"] = dtype
    attributes = [graph.get_attr(f"body_{i}") for i in range(len(bodies))]
    node = graph.call_function(target, make(*attributes, *inputs))
    graph.output(node)
    gm = GraphModule({f"body_{i}": b for i, b in enumerate(bodies)}, graph)
    annotated(gm)
    return gm.graph.find_nodes(op="call_function", target=target)[0]


def test_bodies_of_checkpointed_regions() -> None:
    inner = body(lambda x, w: (F.linear(x, w), x.argmax(-1)))
    target = torch.ops.higher_order.tag_activation_checkpoint
    node = higher_order(target, [inner], lambda b, x, w: (b, x, w), BF16, BF16)
    assert node.meta["dtype"] == (BF16, INT)
    assert [n.meta["dtype"] for n in inner.graph.nodes if n.op != "output"] == [BF16, BF16, BF16, INT]


def test_bodies_of_branches_and_loops() -> None:
    yes, no = body(lambda x: (x.exp(),)), body(lambda x: (x + 1.0,))
    node = higher_order(torch.ops.higher_order.cond, [yes, no], lambda a, b, p, x: (p, a, b, (x,)), torch.bool, BF16)
    assert node.meta["dtype"] == (BF16,)
    test, step = body(lambda i, x: i < 3), body(lambda i, x: (i + 1, x * 2))
    loop = torch.ops.higher_order.while_loop
    node = higher_order(loop, [test, step], lambda c, b, i, x: (c, b, (i, x), ()), INT, BF16)
    assert node.meta["dtype"] == (INT, BF16)


def test_running_twice_changes_nothing() -> None:
    gm = annotated(traced(Attention()))
    before = format_graph(gm)
    assert propagate(gm, CONTEXT).changed is False
    assert format_graph(gm) == before


@pytest.mark.parametrize("name", ["native_layer_norm", "var_mean", "max_pool2d_with_indices"])
def test_a_packet_gives_as_many_results_as_its_overloads(name: str) -> None:
    packet, x = getattr(torch.ops.aten, name), torch.ones(1, 3, 4)
    more = {"native_layer_norm": ([4], None, None, 1e-5), "max_pool2d_with_indices": ([2],)}.get(name, ())
    for target in (packet, packet.default):
        node = one_call(target, "call_function", (x, *more), {})
        propagate(GraphModule({}, node.graph), CONTEXT)
        assert node.meta["dtype"] == dtypes_of(target(x, *more))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("kernel", ["flash_attention_for_cpu", "flash_attention", "efficient_attention",
                                    "cudnn_attention", "attention_math"])  # fmt: skip
def test_kernels_of_attention_give_their_statistics_too(kernel: str, dtype: torch.dtype) -> None:
    packet = getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}")
    x = torch.ones(1, 2, 64, 8, dtype=dtype, device="cpu" if kernel.endswith(("cpu", "math")) else "meta")
    args = (x, x, x, None, True) if kernel in ("efficient_attention", "cudnn_attention") else (x, x, x)
    for target in (packet, packet.default):
        node = one_call(target, "call_function", args, {})
        propagate(GraphModule({}, node.graph), CONTEXT)
        assert node.meta["dtype"] == dtypes_of(target(*args))


def test_the_statistics_of_a_lowered_attention_are_as_wide_as_ever() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Any:
            y = self.project(x).reshape(1, 2, 4, 8)
            out, statistics = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(y, y, y)
            return out, statistics, statistics * 2, out.sum() + statistics.sum()

    model, x = Attention(), torch.randn(8, 8)
    want = model(x)
    got = fxprec.convert(model, dtype=torch.bfloat16)[0](x)
    assert dtypes_of(got) == dtypes_of(want)
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, atol=0.05, rtol=0.02)
