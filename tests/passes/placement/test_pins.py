"""pins: numbers and chains that low precision cannot hold, and memory that is written in place."""

from __future__ import annotations

import operator

import pytest
import torch
import torch.nn.functional as F

from fxprec.passes.graph.annotations import Arrival, Rule, graph_notes
from fxprec.passes.placement.walk import written_classes
from fxprec.passes.policy.policy import Policy

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
X, W = torch.randn(4, 4), torch.randn(4, 4)


@pytest.fixture
def decided(tools):
    def run(function, *inputs, level="O1", **settings):
        gm = tools.traced(function, *(inputs or (X, W)))
        tools.rewritten(gm, tools.context(level, **settings), until="decide")
        return {node.name: node.meta["precision"] for node in gm.graph.nodes}, gm

    return run


def between_products(op):
    """An op with only low neighbours: it is low unless something pins it."""
    return lambda x, w: F.linear(op(F.linear(x, w)), w)


@pytest.mark.parametrize(
    ("op", "name", "bf16", "fp16"),
    [
        (lambda y: y.masked_fill(y > 1, torch.finfo(FP32).min), "masked_fill", FP32, FP32),
        (lambda y: y.masked_fill(y > 1, -1e9), "masked_fill", BF16, FP32),
        (lambda y: y.masked_fill(y > 1, -70000), "masked_fill", BF16, FP32),
        (lambda y: y.masked_fill(y > 1, float("-inf")), "masked_fill", BF16, FP16),
        (lambda y: torch.where(y > 1, y, -1e9), "where", BF16, FP32),
        (lambda y: y + 1e-8, "add", BF16, FP32),
        (lambda y: y * 1e-6, "mul", BF16, FP32),
        (lambda y: y * 0.0, "mul", BF16, FP16),
        (lambda y: y * 0.125, "mul", BF16, FP16),
        (lambda y: y.clamp(min=1e-12), "clamp", BF16, FP32),
        (lambda y: y.clamp(1.2e-7, 1 - 1.2e-7), "clamp", FP32, FP32),
        (lambda y: y.clamp(max=0.9985), "clamp", FP32, FP16),
        (lambda y: y.clamp(-0.99, 0.99), "clamp", BF16, FP16),
        (lambda y: y.clamp(max=1.0), "clamp", BF16, FP16),
        (lambda y: F.hardtanh(y, -0.9999999, 0.9999999), "hardtanh", FP32, FP32),
        (lambda y: y.masked_fill(y > 0.9999999, 0.5), "gt", FP32, FP32),
        (lambda y: y * 0.9999999 + 0.9999999, "mul", BF16, FP16),
        (lambda y: y.view(4, 4, -1).view(4, 4), "view", BF16, FP16),
        (lambda y: y.roll(70000), "roll", BF16, FP16),
        (lambda y: F.pad(y, (1, -1), value=-1e9), "pad", BF16, FP32),
        (lambda y: F.dropout(y, 1e-9), "dropout", BF16, FP16),
        (lambda y: y / ((y * torch.relu(y)) + 1e-3), "add", FP32, FP16),
        (lambda y: y / torch.sqrt(y + 1e-5), "add", FP32, FP32),
        (lambda y: y + 1e-5, "add", BF16, FP32),
        (lambda y: y + 1e-4, "add", BF16, FP16),
    ],
)
def test_numbers(decided, op, name, bf16, fp16):
    assert decided(between_products(op), low=BF16)[0][name].reads is bf16
    assert decided(between_products(op), low=FP16)[0][name].reads is fp16


def test_a_pin_says_why(decided):
    found, _ = decided(between_products(lambda y: y.masked_fill(y > 1, -1e9)), low=FP16)
    assert found["masked_fill"].why == "float16 cannot hold -1000000000.0"


def test_a_bound_that_rounds_to_a_pole_says_so(decided):
    found, _ = decided(between_products(lambda y: y.clamp(max=-0.9999999)))
    assert found["clamp"].why == "-0.9999999 is -1 in bfloat16, which may be a pole"


def test_a_division_by_a_guarded_sum_is_fp32(decided):
    found, _ = decided(between_products(lambda y: y / (y + 1e-5)), level="O2")
    assert found["add"].reads is found["truediv"].reads is FP32


def test_what_lies_between_an_exponential_and_its_sum_is_fp32(decided):
    def f(x, w):
        e = torch.exp(F.linear(x, w))
        part = torch.relu(e.view(-1))
        return F.linear(part.view(4, 4) / part.sum(), w), F.linear(torch.relu(e), w)

    found, _ = decided(f, level="O2")
    assert found["view"].output is found["relu"].output is FP32
    assert found["relu"].why == "between an exponential and a reduction of it"
    assert found["relu_1"].output is BF16, "leads to a product only"


def test_classes_hold_only_what_is_written(decided):
    def f(x, w):
        y = torch.relu(x)
        seen = y.view(-1)
        z = torch.relu(w)
        also = z.view(-1)
        also.add_(1.0)
        picked = z[[0, 1]]
        return y, seen, z.t(), picked

    _, gm = decided(f)
    classes = {node.name: root.name for node, root in written_classes(gm.graph).items()}
    assert classes == {"relu_1": "relu_1", "view_1": "relu_1", "add_": "relu_1", "t": "relu_1"}


def test_a_cast_to_the_same_dtype_is_the_very_tensor(decided):
    def f(x, w):
        y = F.linear(x, w)
        same = y.float()
        same.add_(1.0)
        return y, y.half()

    found, gm = decided(f)
    classes = {node.name for node in written_classes(gm.graph)}
    assert classes == {"linear", "float_1", "add_"}
    assert found["float_1"].output is found["add_"].output is FP32
    linear = next(node for node in gm.graph.nodes if node.name == "linear")
    assert (found["linear"].output, linear.meta["stored_dtype"]) == (BF16, FP32)


def test_a_class_has_one_dtype(decided):
    """The FP32 operand of an in-place op widens nobody, as in torch."""

    def f(x, w):
        y = F.linear(x, w)
        y.add_(x)
        y.relu_()
        return F.linear(y.view(-1, 4), w)

    found, gm = decided(f)
    assert {found[name].output for name in ("linear", "add_", "relu_", "view")} == {BF16}
    assert all("stored_dtype" not in node.meta for node in gm.graph.nodes)


def test_a_written_product_lives_where_its_pin_says(decided):
    def f(x, w):
        y = F.linear(x, w)
        y.masked_fill_(x > 0, -1e9)
        return torch.softmax(y, -1)

    found, gm = decided(f, low=FP16)
    linear = next(node for node in gm.graph.nodes if node.name == "linear")
    assert linear.meta["stored_dtype"] is FP32
    assert found["linear"].output is FP16, "what its kernel puts out"
    assert found["masked_fill_"].output is FP32
    decided_again, gm = decided(f, low=BF16)
    linear = next(node for node in gm.graph.nodes if node.name == "linear")
    assert linear.meta.get("stored_dtype") in (None, FP32)
    assert decided_again["masked_fill_"].output is linear.meta.get("stored_dtype", BF16)


def test_of_two_pins_fp32_wins(decided):
    def f(x, w):
        y = torch.relu(F.linear(x, w))
        flat = y.view(-1)
        y.masked_fill_(x > 0, -1e9)
        return flat.exp()

    policy = Policy().override(nodes={"view": "low"})
    found, _ = decided(f, low=FP16, policy=policy)
    assert found["relu"].output is found["view"].output is FP32


@pytest.mark.parametrize("settings", [{"low": BF16}, {"placement": "autocast"}, {"level": "O0"}])
def test_a_new_decision_forgets_where_roots_lived(tools, settings):
    gm = tools.traced(lambda x, w: F.linear(F.linear(x, w).masked_fill_(x > 0, -1e9), w), X, W)
    tools.rewritten(gm, tools.context(low=FP16), until="decide")
    assert any("stored_dtype" in node.meta for node in gm.graph.nodes)
    tools.rewritten(gm, tools.context(**settings), until="decide")
    assert not any("stored_dtype" in node.meta for node in gm.graph.nodes)


def test_writes_to_an_input_stay_in_its_dtype(decided):
    def f(x, w):
        x.view(-1).add_(1.0)
        return F.linear(x, w)

    found, _ = decided(f, level="O2")
    assert {found[name].output for name in ("x", "view", "add_")} == {FP32}
    assert found["view"].reads is found["add_"].reads is FP32
    assert found["linear"].reads is BF16


def test_a_norm_and_the_relu_that_overwrites_it(decided):
    def f(x, w):
        y = F.batch_norm(F.conv2d(x, w), torch.zeros(1), torch.ones(1), training=True)
        y.relu_()
        return F.conv2d(y, w)

    found, _ = decided(f, torch.randn(2, 1, 6, 6), torch.randn(1, 1, 3, 3))
    assert found["batch_norm"].compute is FP32
    assert found["batch_norm"].output is found["relu_"].output is BF16


def test_item_assignment(decided, tools):
    """``out[0] = value``: it returns nothing, its value is cast to what it is written into."""
    gm = tools.traced(lambda x, w: (torch.zeros_like(x), F.linear(x, w)), X, W)
    out, value = gm.graph.output_node().args[0]
    with gm.graph.inserting_before(gm.graph.output_node()):
        gm.graph.call_function(operator.setitem, (out, slice(None), value))
    tools.rewritten(gm, tools.context(), until="decide")
    found = {node.name: node.meta["precision"] for node in gm.graph.nodes}
    assert found["zeros_like"].output is FP32
    assert (found["setitem"].reads, found["setitem"].output) == (FP32, None)


def test_a_write_that_converts_takes_anything(decided):
    def f(x, w):
        y = torch.relu(x)
        y.copy_(F.linear(x, w))
        return torch.exp(y)

    found, _ = decided(f)
    assert found["copy_"].reads is Arrival.AS_IT_ARRIVES
    assert found["copy_"].output is FP32


def test_pins_that_no_answer_can_honour_are_declined(tools):
    def f(x, w):
        y = F.linear(x, w).to(torch.bfloat16)
        y.masked_fill_(x > 0, torch.finfo(FP32).min)
        return y

    gm = tools.traced(f, X, W)
    tools.rewritten(gm, tools.context(), until="decide")
    precision = {node.name: node.meta["precision"] for node in gm.graph.nodes}
    assert precision["masked_fill_"].output is BF16
    assert any("masked_fill_" in reason for reason in graph_notes(gm).declined)


def test_random_writes_keep_the_original_dtype(decided):
    def f(x, w):
        noise = torch.relu(F.linear(x, w))
        noise.normal_()
        return F.linear(noise, w)

    found, _ = decided(f, level="O2")
    assert (found["normal_"].rule, found["normal_"].output, found["relu"].output) == (Rule.KEEP, FP32, FP32)


@torch.library.custom_op("fxprec_pins::bump", mutates_args={"x"})
def bump(x: torch.Tensor) -> None:
    x.add_(1.0)


def test_what_a_custom_op_writes_keeps_its_dtype(tools):
    def f(x, w):
        y = F.linear(x, w)
        torch.ops.fxprec_pins.bump.default(y)
        return F.linear(y, w)

    gm = tools.rewritten(tools.traced(f, X, W), tools.context())
    assert torch.allclose(gm(X, W), f(X, W), rtol=0.02, atol=0.05)


def test_written_values_are_right(tools):
    """The whole pipeline on a class that lives in FP32 behind a product, seen through a view."""

    def f(x, w):
        y = F.linear(x, w)
        top = y[0]
        y.masked_fill_(x > 0, -1e9)
        return top, torch.softmax(y, -1)

    expected = f(X, W)
    gm = tools.rewritten(tools.traced(f, X, W), tools.context())
    for ours, theirs in zip(gm(X, W), expected, strict=True):
        assert torch.allclose(ours, theirs, rtol=0.02, atol=0.05)


#: Writes that add up many values in one place -> how they are spelled, and devices on which their kernels do it low.
WRITES = {
    "index_put": (lambda z, i, y: z.index_put((i,), y, accumulate=True), ("cpu",)),
    "put": (lambda z, i, y: z.put(i, y, accumulate=True), ("cpu",)),
    "index_add": (lambda z, i, y: z.index_add(0, i, y), ("cpu", "cuda")),
    "index_add_": (lambda z, i, y: z.index_add_(0, i, y), ("cpu", "cuda")),
    "index_reduce": (lambda z, i, y: z.index_reduce(0, i, y, "mean"), ("cpu", "cuda")),
    "scatter_reduce": (lambda z, i, y: z.scatter_reduce(0, i, y, "sum"), ("cuda",)),
    "scatter_add": (lambda z, i, y: z.scatter_add(0, i, y), ("cuda",)),
    "scatter": (lambda z, i, y: z.scatter(0, i, y, reduce="add"), ("cuda",)),
}
EXACT = {
    "index_put": lambda z, i, y: z.index_put((i,), y),
    "put": lambda z, i, y: z.put(i, y),
    "index_reduce": lambda z, i, y: z.index_reduce(0, i, y, "amax"),
    "scatter_reduce": lambda z, i, y: z.scatter_reduce(0, i, y, "amin"),
    "scatter": lambda z, i, y: z.scatter(0, i, y),
    "index_copy": lambda z, i, y: z.index_copy(0, i, y),
}
PLACES = torch.zeros(4, dtype=torch.long)


def written(op):
    return lambda x, w, i: F.linear(op(F.linear(x, w).flatten().new_zeros(16), i, F.linear(x, w)[0]).view(4, 4), w)


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("name", WRITES)
def test_what_a_kernel_adds_up_in_its_data_s_dtype_is_fp32(decided, name, device, level):
    op, devices = WRITES[name]
    found, _ = decided(written(op), X, W, PLACES, level=level, device=device)
    assert found[name].reads is found[name].output is (FP32 if device in devices else BF16)
    assert ("stay at a few hundred" in found[name].why) is (device in devices)


@pytest.mark.parametrize("name", EXACT)
def test_writes_that_add_nothing_up_are_low(decided, name):
    for device in ("cpu", "cuda"):
        assert decided(written(EXACT[name]), X, W, PLACES, device=device)[0][name].reads is BF16


def test_a_sum_in_memory_that_the_user_made_low_is_low(decided):
    found, _ = decided(lambda x, w, i: x.bfloat16().flatten().index_add(0, i, x.bfloat16()[0]), X, W, PLACES)
    assert found["index_add"].reads is not FP32
