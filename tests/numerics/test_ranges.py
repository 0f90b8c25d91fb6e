"""Ranges: histograms are those of the values that run, and the loss scale and the dtype that follow do hold."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Interpreter, Node
from torch.utils.checkpoint import checkpoint

import fxprec
from as_it_was import unchanged
from fxprec.model.conversion import conversion_of
from fxprec.numerics import Magnitudes, Range, Ranges, locate, ranges

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
Function = Callable[[Tensor], Tensor]


class Net(nn.Module):
    """Something between layers."""

    def __init__(self, function: Function = torch.relu) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 3)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.function(self.norm(self.first(x))))


def made(function: Function = torch.relu, dtype: torch.dtype = BF16, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    return fxprec.convert(Net(function), dtype=dtype, **options)[0]


def batch(seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(5, 6, generator=generator), torch.randint(0, 3, (5,), generator=generator)


def ranged(model: nn.Module, *args: Any, **kwargs: Any) -> Ranges:
    """And nothing of the model changes."""
    with unchanged(model):
        found = ranges(model, *args, **kwargs)
    text = " ".join(str(found).split())
    assert all(each in text for each in (found.headline, *found.reasons, *found.warnings, *found.remarks)), text
    assert json.dumps(found.to_dict(), allow_nan=False)
    return found


def by_hand(*parts: Tensor) -> dict[int, int]:
    found: dict[int, int] = {}
    for x in torch.cat([part.detach().double().flatten() for part in parts]).tolist():
        if x and math.isfinite(x):
            exponent = max(math.frexp(x)[1] - 1, -127)
            found[exponent] = found.get(exponent, 0) + 1
    return dict(sorted(found.items()))


def only(found: Ranges, node: str, phase: str = "forward", dtype: str | None = None) -> Range:
    [row] = [each for each in found.rows if (each.node, each.phase) == (node, phase) and dtype in (None, each.dtype)]
    return row


class Values(Interpreter):
    """Node -> its value."""

    def __init__(self, gm: torch.fx.GraphModule) -> None:
        super().__init__(gm)
        self.values: dict[str, Any] = {}

    def run_node(self, n: Node) -> Any:
        self.values[n.name] = value = super().run_node(n)
        return value


@pytest.mark.parametrize("dtype", [BF16, F16])
def test_values_of_nodes(dtype: torch.dtype) -> None:
    model, (x, y) = made(F.gelu, dtype), batch()
    model(x)
    found = ranged(model, [(x, y)], F.cross_entropy)
    interpreter = Values(fxprec.graphs(model)[0])
    interpreter.run(x)
    rows = [row for row in found.rows if row.kind == "node" and row.phase == "forward"]
    assert {row.op for row in rows} == {"cast", "linear", "layer_norm", "gelu"}
    for row in rows:
        value = interpreter.values[row.node]
        assert (row.values.exponents, row.dtype) == (by_hand(value), str(value.dtype)[6:])
        assert row.values.largest == value.abs().max().item() and row.values.smallest == value.abs().min().item()
        assert row.values.count == value.numel() and row.flushed == (0 if dtype is F16 else None)
    shadow = only(found, "first.weight")
    assert (shadow.op, shadow.module, shadow.kind) == ("shadow", "first", "weight")
    assert shadow.values.exponents == by_hand(model.get_parameter("first.weight").to(dtype))
    outside = {row.node for row in found.rows if row.kind == "outside" and row.phase == "forward"}
    assert outside <= {"_to_copy", "_log_softmax", "nll_loss_forward", "ones_like"}, "the loss, and its gradient"
    assert only(found, "linear").module == "first" and "test_ranges.py:" in only(found, "linear").source


@pytest.mark.parametrize("called", [False, True])
def test_low_copies_of_weights_count_once(called: bool) -> None:
    """Whether they are made in the run, written again, or there already; and those of weights that have none."""
    model = made()
    if called:
        model(batch()[0])
        with torch.no_grad():
            model.get_parameter("first.weight").mul_(2)
    rows = {row.node: row for row in ranged(model, [batch()], F.cross_entropy).rows if row.op == "shadow"}
    assert {*rows} == {"first.weight", "first.bias", "last.weight", "last.bias"}
    for path, row in rows.items():
        assert row.values.exponents == by_hand(model.get_parameter(path).to(BF16))


def test_several_batches_add_up_and_every_nth_is_run() -> None:
    model, calls = made(), []
    batches = [batch(seed) for seed in range(5)]
    model.register_forward_pre_hook(lambda *_: calls.append(1))
    for every, chosen in ((1, [0, 1, 2, 3, 4]), (2, [0, 2, 4]), (9, [0])):
        found = ranged(model, iter(batches), F.cross_entropy, every=every)
        assert found.batches == len(chosen)
        calls.clear()
        ranged(model, iter(batches), F.cross_entropy, every=every)
        assert len(calls) == len(chosen)
        assert only(found, "x_bf16").values.exponents == by_hand(*(batches[n][0].bfloat16() for n in chosen))


@pytest.mark.parametrize("scale", [None, 2.0**7, 1000.0])
def test_gradients(scale: float | None) -> None:
    """Those that autograd hands on, scaled; and what a parameter's gradient is when all is done."""
    model, (x, y) = made(torch.tanh), batch()
    factor = scale or 1.0
    scaler = None if scale is None else fxprec.LossScaler("cpu", init_scale=scale)
    found = ranged(model, [(x, y)], F.cross_entropy, scaler)
    assert found.ran_at == factor and (scaler is None or scaler.get_scale() == scale)
    (F.cross_entropy(model(x), y) * factor).backward()
    for name, parameter in model.named_parameters():
        row = only(found, name, "backward")
        assert (row.kind, row.op, row.dtype) == ("weight", "gradient", "float32")
        assert row.values.exponents == by_hand(parameter.grad)
    # The backward of the last linear layer: gradients of its input, weight and bias, in one row.
    low, probabilities = F32, model(x).float().softmax(-1)
    seed = ((probabilities - F.one_hot(y, 3)) / 5 * factor).to(BF16)
    row = only(found, "linear_1", "backward", "bfloat16")
    assert row.values.count == 5 * 8 + 3 * 8 + 3 and low is F32
    weight = model.get_parameter("last.weight").to(BF16)
    largest = max(t.abs().max().item() for t in (seed @ weight, seed.sum(0)))
    assert row.values.largest >= 0.98 * largest


def test_a_node_keeps_its_backward_where_an_op_without_one_follows() -> None:
    def function(h: Tensor) -> Tensor:
        return h.tanh() * torch.arange(8)

    found = ranged(made(function), [batch()], F.cross_entropy)
    backward = {row.op for row in found.rows if row.kind == "node" and row.phase == "backward"}
    assert {"linear", "layer_norm", "tanh", "mul"} <= backward
    assert not any(row.node in ("arange", "detach") for row in found.rows)


#: What has no values of its own, or values of a kind of its own.
SHAPES: dict[str, tuple[Function, dict[str, int]]] = {
    "views": (lambda h: h.view(5, 2, 4).transpose(1, 2).reshape(5, 8)[:], {"reshape": 40}),
    "in place": (lambda h: (h * 2).relu_(), {"mul": 40, "relu_": 40}),
    "several results": (lambda h: torch.cat(h.sort(-1).values.chunk(2, -1), -1), {"sort": 40, "cat": 40}),
    "empty": (lambda h: torch.cat([h, h[:0] * 2]), {"cat": 40}),
    "memory": (lambda h: torch.empty_like(h).copy_(h), {"copy_": 40}),
    "part of memory": (lambda h: torch.nn.functional.pad(h, (1, 1))[:, 1:-1], {"pad": 50}),
    "complex": (
        lambda h: torch.view_as_real(torch.view_as_complex(h.float().view(5, 4, 2)) * 2).flatten(1),
        {"to": 40, "mul": 40},
    ),
    "integers": (lambda h: h * h.argsort(-1).argsort(-1), {"mul": 40}),
}


@pytest.mark.parametrize("name", SHAPES)
def test_what_a_node_gives(name: str) -> None:
    function, expected = SHAPES[name]
    found = ranged(made(function), [batch()], F.cross_entropy)
    rows = [row for row in found.rows if row.kind == "node" and row.phase == "forward"]
    counts = {row.op: row.values.count for row in rows if row.op not in ("linear", "layer_norm", "cast")}
    assert counts == {op.rstrip("_"): count for op, count in expected.items()} or counts == expected


def test_several_outputs_of_several_dtypes() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(6, 8)

        def forward(self, x: Tensor) -> dict[str, Any]:
            h = self.fc(x)
            return {"low": h, "wide": [h.float().exp(), (h > 0)]}

    model = fxprec.convert(Two(), dtype=BF16, keep_output_dtype=False)[0]
    found = ranged(model, [(batch()[0],)])
    assert only(found, "exp").dtype == "float32" and only(found, "linear").dtype == "bfloat16"
    assert only(found, "linear", "backward").values.count and only(found, "fc.bias", "backward").values.count == 8


def test_a_checkpoint_counts_once() -> None:
    model = made(lambda h: checkpoint(lambda v: torch.tanh(v).sin() * 2, h, use_reentrant=False))
    found = ranged(model, [batch()], F.cross_entropy)
    inside = [row for row in found.rows if row.op in ("tanh", "sin", "mul") and row.phase == "forward"]
    assert [row.values.count for row in inside] == [40, 40, 40]
    [backward] = [row for row in found.rows if row.op == "tanh" and row.phase == "backward"]
    assert backward.values.count == 40, "its gradient, without what is computed again"


@pytest.mark.slow
def test_what_runs_between_the_graphs() -> None:
    def function(h: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return h.tanh() * 3 if h.abs().max().item() > 0 else h

    found = ranged(made(function), [batch()], F.cross_entropy)
    assert {row.op for row in found.rows if row.kind == "node" and row.phase == "forward"} >= {"linear", "tanh"}
    outside = {row.node for row in found.rows if row.kind == "outside"}
    assert outside & {"nll_loss_forward", "_log_softmax"}
    names = {row.node for row in found.rows if row.kind == "weight" and row.phase == "forward"}
    assert {"first.weight", "last.weight"} <= names


def test_fused_regions_are_opened() -> None:
    model = made(lambda h: F.gelu(h) * 3 + 1, fuse="aten")
    found = ranged(model, [batch()], F.cross_entropy)
    inside = {row.op for row in found.rows if row.region and row.phase == "forward"}
    assert {"gelu", "mul", "add"} <= inside


@pytest.mark.parametrize("adds", [True, False])
def test_masks_are_no_overflow(adds: bool) -> None:
    def function(h: Tensor) -> Tensor:
        scores = h[:, :5] @ h[:, :5].T
        if adds:
            scores = scores + torch.full((5, 5), -torch.inf).triu(1)
        else:
            scores = scores.masked_fill(torch.ones(5, 5).triu(1) > 0, -torch.inf)
        return scores.softmax(-1) @ h

    found = ranged(made(function, F16), [batch()], F.cross_entropy)
    infinite = [row for row in found.rows if row.values.infinite]
    assert infinite and not any(row.overflowed for row in found.rows)
    assert found.dtype is F16


LINEAR_1E5: Function = lambda h: F.linear(h.abs() + 1, torch.full((8, 8), 1e4)) * 1e-5  # noqa: E731
#: Function, what the loss is multiplied by -> dtype, and a piece of the reasons.
VERDICTS: dict[str, tuple[Function, Callable[[Tensor, Tensor], Tensor], torch.dtype, str]] = {
    "sound": (torch.relu, F.cross_entropy, F16, "three bits"),
    "tiny gradients": (torch.relu, lambda out, y: F.cross_entropy(out, y) * 1e-9, F16, "three bits"),
    "overflow": (LINEAR_1E5, F.cross_entropy, BF16, "float16's 65504"),
    "gradients' span": (
        torch.relu,
        lambda out, y: out[:1].sum() * 1e4 + out[1:].sum() * 1e-12,
        BF16,
        "float16 has 40",
    ),
    "values lost": (lambda h: F.linear(h, torch.eye(8) * 1e-9) * 1e9, F.cross_entropy, BF16, "would be 0 in float16"),
}


@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("name", VERDICTS)
def test_the_dtype_that_fits(name: str, dtype: torch.dtype) -> None:
    function, loss, expected, reason = VERDICTS[name]
    found = ranged(made(function, dtype), [batch()], loss)
    assert found.dtype is expected and any(reason in each for each in found.reasons), str(found)
    assert not found.remarks


@pytest.mark.parametrize("function", [torch.relu, F.gelu, lambda h: F.linear(h, torch.eye(8) * 300)])
@pytest.mark.parametrize("loss_factor", [1e-6, 1.0, 300.0])
@pytest.mark.parametrize("dtype", [BF16, F16])
def test_the_largest_safe_scale(function: Function, loss_factor: float, dtype: torch.dtype) -> None:
    def loss(out: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(out, y) * loss_factor

    found = ranged(made(function, dtype), [batch()], loss)
    assert found.scale is not None and math.log2(found.scale).is_integer()
    scaler = fxprec.LossScaler("cpu", init_scale=found.scale)
    model = made(function, F16)
    assert locate(model, batch(), loss, scaler) is None
    too_large = fxprec.LossScaler("cpu", init_scale=found.scale * 16)
    finding = locate(model, batch(), loss, too_large)
    assert finding is not None and finding.phase == "backward"
    assert finding.kind == ("scale too large" if found.scale >= 1 else "overflow"), "locate advises no scale below 1"
    again = ranged(made(function, dtype), [batch()], loss, too_large)
    assert again.scale == found.scale, "whatever scale it ran at"


def test_the_smallest_useful_scale() -> None:
    def loss(out: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(out, y) * 1e-7

    found = ranged(made(torch.tanh, BF16), [batch()], loss)
    assert found.scale is not None and found.smallest_scale is not None and 1 < found.smallest_scale < found.scale

    def flushed(scale: float) -> float:
        """What a float16 run at the scale has lost, of all gradients of its nodes."""
        scaler = fxprec.LossScaler("cpu", init_scale=scale)
        rows = [r for r in ranges(made(torch.tanh, F16), [batch()], loss, scaler).rows if r.phase == "backward"]
        rows = [r for r in rows if r.dtype == "float16" and r.wide is not None]
        return sum(max(0, r.values.zeros - r.wide.zeros) for r in rows) / sum(r.values.count for r in rows)

    assert flushed(found.scale) == 0 and flushed(found.smallest_scale) < 0.01
    assert flushed(found.smallest_scale / 256) > 0.1


@pytest.mark.parametrize("scaler", [None, "disabled", "enabled"])
def test_float16_that_trains_unscaled(scaler: str | None) -> None:
    def loss(out: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(out, y) * 1e-8

    given = None if scaler is None else fxprec.LossScaler("cpu", init_scale=2.0**20, enabled=scaler == "enabled")
    found = ranged(made(torch.tanh, F16), [batch()], loss, given)
    assert found.scale is not None
    if scaler == "enabled":
        assert not found.warnings and found.ran_at == 2.0**20
        small = fxprec.LossScaler("cpu", init_scale=2.0)
        assert not ranged(made(torch.tanh, F16), [batch()], loss, small).warnings, "it is scaled, if too little"
        return
    [warning] = found.warnings
    assert (
        "float16 trains unscaled" in warning
        and f"fxprec.LossScaler(init_scale=2.0**{math.log2(found.scale):g})" in warning
    )
    [cast] = [row for row in found.rows if row.op == "cast" and row.phase == "backward" and row.module == "last"]
    assert cast.flushed is not None and cast.flushed > 0.5 and cast.wide is not None
    assert cast.flushed == pytest.approx(cast.flushed_in(F16), abs=0.1)
    assert not ranged(made(torch.tanh, BF16), [batch()], loss, given).warnings


def test_a_scale_that_is_too_large_is_seen() -> None:
    scaler = fxprec.LossScaler("cpu", init_scale=2.0**30)
    found = ranged(made(torch.relu, F16), [batch()], F.cross_entropy, scaler)
    assert any(row.overflowed for row in found.rows if row.phase == "backward")
    assert found.scale is not None and found.scale < 2.0**20 and found.dtype is F16


def test_a_loss_in_float16_bounds_the_scale() -> None:
    def loss(out: Tensor, y: Tensor) -> Tensor:
        return out.half().mean() * 1e-3 + 2000

    found = ranged(made(torch.relu, F16), [batch()], loss)
    assert found.scale == 8.0, "2000 * 8 keeps two bits to 65504"


def test_gradients_that_are_not_finite_have_no_scale() -> None:
    found = ranged(made(lambda h: (h * 0).sqrt()), [batch()], F.cross_entropy)
    assert found.scale is None and found.smallest_scale is None
    assert "locate" in found.reasons[0] and "there is no loss scale" in found.headline


@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("what", ["the loss was", "gradients were"])
def test_what_was_not_finite_is_told_with_its_batches(what: str, dtype: torch.dtype) -> None:
    def loss(out: Tensor, y: Tensor) -> Tensor:
        bad = bool(y[0] == 7)
        factor = torch.nan if bad and "loss" in what else 1.0
        root = (out * 0).sqrt().sum() if bad else 0.0  # whose gradient is nan, and whose value is 0
        return F.cross_entropy(out, y.clamp(max=2)) * factor + root

    batches = [batch(seed) for seed in range(5)]
    for number in (2, 3, 4):
        batches[number][1][0] = 7
    for every, told in ((1, "2, 3, 4"), (2, "2, 4")):
        found = ranged(made(dtype=dtype), batches, loss, every=every)
        assert found.scale is None
        assert found.why_no_scale.startswith(f"{what} not finite in batch {told}: fxprec.numerics.locate says")
        assert found.headline.endswith(found.why_no_scale)
    assert ranged(made(dtype=dtype), batches[:2], loss).why_no_scale == ""


def test_advice_names_nodes_of_the_model_and_not_of_its_copy() -> None:
    model = made(lambda h: (h + 14).exp(), F16)
    found = ranged(model, [batch()], F.cross_entropy)
    assert found.dtype is BF16 and "beyond float16's 65504" in found.reasons[0]
    names = {node.name for gm in fxprec.graphs(model) for node in gm.graph.nodes}
    assert "exp_f16" in names and found.reasons[0].startswith("exp_f16 (")


def test_without_gradients() -> None:
    model = made()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    found = ranged(model, [batch()], F.cross_entropy)
    assert found.scale is None and found.dtype is F16 and not any(row.phase == "backward" for row in found.rows)
    assert found.why_no_scale == "no gradient is in low precision"


def test_nothing_is_low() -> None:
    found = ranged(fxprec.convert(Net(), level="O0")[0], [batch()], F.cross_entropy)
    assert found.dtype is None and "no value of the run is in low precision" in found.headline


def test_folded() -> None:
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3)), nn.Linear(6, 6))
    model = fxprec.convert(layers, dtype=F16)[0]
    found = ranged(model, [(batch()[0],)])
    folded = found.folded()
    [row] = [row for row in folded.rows if row.op == "tanh" and row.phase == "forward"]
    own = [row for row in found.rows if row.op == "tanh" and row.phase == "forward"]
    assert len(own) == 3 and row.node == "tanh (3 of them)" and row.module == "*.*"
    assert row.values == sum((each.values for each in own), Magnitudes()) and row.wide is not None
    assert [each.margin for each in folded.rows] == sorted(each.margin for each in folded.rows)


def test_a_sparse_gradient() -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.last = nn.Embedding(9, 8, sparse=True), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.embedding(x))

    model = fxprec.convert(Words(), dtype=BF16)[0]
    x, y = torch.tensor([0, 3, 3, 8, 1]), batch()[1]
    found = ranged(model, [(x, y)], F.cross_entropy)
    F.cross_entropy(model(x), y).backward()
    expected = by_hand(model.get_parameter("embedding.weight").grad.coalesce().values())
    assert only(found, "embedding.weight", "backward").values.exponents == expected
    assert "sparse" in " ".join(found.remarks) or not found.remarks


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda m: ranges(nn.Linear(2, 2), [batch()]), fxprec.ConversionError, "not converted"),
        (lambda m: ranges(fxprec.freeze(m), [batch()]), fxprec.ConversionError, "frozen"),
        (lambda m: ranges(m, [batch()], 3), TypeError, "loss must be a function"),
        (lambda m: ranges(m, [batch()], F.cross_entropy, 2.0), TypeError, "scaler must be"),
        (lambda m: ranges(m, [batch()], F.cross_entropy, every=0), ValueError, "at least 1"),
        (lambda m: ranges(m, [batch()], F.cross_entropy, every=1.5), TypeError, "whole number"),
        (lambda m: ranges(m, [], F.cross_entropy), ValueError, "there is no batch"),
        (lambda m: ranges(m, batch()[0], F.cross_entropy), TypeError, "batches must be a list"),
        (lambda m: ranges(m, [batch()[:1]], F.cross_entropy), ValueError, "a batch of 1 part is not"),
        (lambda m: ranges(m, [batch()], lambda out, y: out), ValueError, "must be a scalar"),
    ],
)
def test_errors(call: Callable[[nn.Module], Any], error: type[Exception], text: str) -> None:
    model = made()
    model(batch()[0])
    with pytest.raises(error, match=text):
        call(model.eval())


def test_a_copy_that_does_not_run_in_bfloat16_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules["fxprec.numerics.ranges"]
    counted = module._counted

    def refused(problem: Any, *others: Any) -> Any:
        if conversion_of(problem.model).settings.dtype is BF16:
            raise RuntimeError("no kernel for bfloat16")
        return counted(problem, *others)

    monkeypatch.setattr(module, "_counted", refused)
    found = ranged(made(lambda x: x * 1, F16), [batch()] * 2, F.cross_entropy)
    [remark] = found.remarks
    assert "does not run in bfloat16" in remark and "no kernel for bfloat16" in remark
    assert found.batches == 2 and found.dtype is F16 and found.scale is not None
    assert all(row.flushed is None for row in found.rows)


class Large(nn.Module):
    """Values of some hundreds in low precision, of which something is made."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.function, self.last = nn.Linear(8, 8), function, nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.function(self.first(x) * 400) / 1e6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("function", "fits"),
    [
        (lambda h: h.square(), torch.float16),
        (lambda h: h * h, torch.float16),
        (lambda h: h * 2000, torch.bfloat16),
    ],
)
def test_float16_is_judged_by_what_its_policy_runs_low(function: Any, fits: torch.dtype, dtype: torch.dtype) -> None:
    """A square is FP32 in float16, though it is low in bfloat16: how large it gets is no reason against float16."""
    torch.manual_seed(0)
    x = torch.randn(4, 8)
    model = fxprec.convert(Large(function), (x,), dtype=dtype).module
    found = ranges(model, [(x,), (x,)])
    assert found.dtype is fits, found.reasons
    assert fits is torch.float16 or "beyond float16's 65504" in found.reasons[0]
