"""Copies of a graph module, and further traces of it, give what it gives: values, gradients, writes, random numbers."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

import fxprec
from fxprec.capture.symbolic.tracer import check_dim
from fxprec.kernels.calls.batch_norm import batch_norm
from fxprec.kernels.calls.cross_entropy import cross_entropy
from fxprec.kernels.rows.run.region import FusedRegion
from fxprec.passes.canonical.rotary import rope
from fxprec.passes.fuse import draw_seeds_like
from fxprec.passes.graph.casts import cast_each, cast_if_float, cast_saturating, write_out
from fxprec.passes.graph.exact_graph import write
from fxprec.passes.graph.text import format_graph
from fxprec.programs.call_form import restored
from fxprec.programs.program import checkpointed
from graph_ways import EXACT, RUNNERS, VALUES, extracted, pickled

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
IMAGE = X.view(1, 4, 8)
MASK = torch.full((4, 4), torch.finfo(torch.float32).min).triu(1)


def linear() -> nn.Linear:
    return nn.Linear(8, 8)


def mlp(*more: nn.Module) -> nn.Module:
    return nn.Sequential(linear(), nn.GELU(), nn.LayerNorm(8), *more, linear())


class Masked(nn.Module):
    """Attention with an additive mask: a cast that must not overflow."""

    def __init__(self) -> None:
        super().__init__()
        self.to_q = linear()

    def forward(self, x, mask):
        q = self.to_q(x).view(1, 2, 4, 4)
        return F.scaled_dot_product_attention(q, q, q, attn_mask=mask)


class Pieces(nn.Module):
    """Results that are lists and tuples, cast as such."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = linear()

    def forward(self, x):
        soft = [F.softmax(part, -1) for part in self.fc(x).chunk(2, -1)]
        return torch.cat(soft, -1) @ x.new_ones(8, 8) + self.fc(x).max(0)[0]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = linear(), linear()
        self.b.weight = self.a.weight

    def forward(self, x):
        return self.b(F.gelu(self.a(x)))


class Buffers(nn.Module):
    """Reads, and writes, what is no parameter: torch.fx runs that when it traces, and keeps the result."""

    def __init__(self, writes: bool) -> None:
        super().__init__()
        self.fc, self.writes = linear(), writes
        self.register_buffer("scale", torch.randn(8, 8))
        self.register_buffer("mean", torch.zeros(4, 8), persistent=False)

    def forward(self, x):
        h = self.fc(x)
        if self.writes:
            self.mean.mul_(0.9).add_(h.detach() * 0.1)
        return h @ self.scale + self.scale.sum() + self.mean


class OutOf(nn.Module):
    """Under dynamo: memory and random numbers made in the forward, a part without gradients, a checkpoint."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.fc, self.kind = linear(), kind

    def forward(self, x):
        h = self.fc(x)
        if self.kind == "memory":
            made = torch.zeros(4, 8)
            made += h
            return made + torch.rand(4, 8)
        if self.kind == "no_grad":
            with torch.no_grad():
                return h + self.fc(x) * 2
        return checkpoint(lambda y: F.dropout(F.gelu(self.fc(y)), 0.5, self.training), x, use_reentrant=False)


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv1d(4, 6, 3, padding=1), nn.BatchNorm1d(6)

    def forward(self, x):
        return F.relu(self.bn(self.conv(x)))


MODELS: dict[str, tuple[Any, tuple[Tensor, ...], bool, dict[str, Any]]] = {
    "mlp": (mlp, (X,), False, {}),
    "dropout": (lambda: mlp(nn.Dropout(0.5)), (X,), True, {}),
    "batch norm in training": (Norm, (IMAGE,), True, {}),
    "batch norm": (Norm, (IMAGE,), False, {}),
    "mask": (Masked, (X, MASK), False, {}),
    "pieces": (Pieces, (X,), False, {}),
    "tied": (Tied, (X,), True, {}),
    "buffers": (lambda: Buffers(False), (X,), False, {}),
    "writes": (lambda: Buffers(True), (X,), True, {}),
    "dynamo": (mlp, (X,), True, {"capture": "dynamo"}),
    "memory": (lambda: OutOf("memory"), (X,), True, {"capture": "dynamo"}),
    "no_grad": (lambda: OutOf("no_grad"), (X,), True, {"capture": "dynamo"}),
    "checkpoint": (lambda: OutOf("checkpoint"), (X,), True, {"capture": "dynamo"}),
    "regions": (lambda: mlp(nn.Dropout(0.5)), (X,), True, {"fuse": "aten"}),
    "pays": (mlp, (X,), False, {"lower": "pays"}),
    "O0": (mlp, (X,), True, {"level": "O0"}),
    "O2": (mlp, (X,), True, {"level": "O2"}),
    "O3": (mlp, (X,), True, {"level": "O3"}),
    "float16": (mlp, (X,), True, {"dtype": torch.float16}),
}  # fmt: skip


class Case:
    """A converted model in a known state, its graph module, and what that gives."""

    def __init__(self, name: str, examples: bool) -> None:
        make, self.inputs, training, options = MODELS[name]
        torch.manual_seed(0)
        self.model = make().train(training)
        self.state = copy.deepcopy(self.model.state_dict())
        self.mean = copy.deepcopy(dict(self.model.named_buffers()))
        given = self.inputs if examples or options.get("lower") else None
        fxprec.convert(self.model, given, **{"dtype": torch.bfloat16, "scaler": False, **options})
        self.expected = self.run(self.model)
        self.gm = fxprec.graph_module(self.model)

    def run(self, function: Any) -> tuple[list[Tensor], dict[str, Tensor]]:
        """Results, and afterwards the state, with gradients: from the state that the model had first."""
        part = function if isinstance(function, nn.Module) else self.gm
        tensors = dict(part.named_parameters()) | dict(part.named_buffers())
        first = self.state | self.mean
        with torch.no_grad():
            for name, tensor in tensors.items():
                tensor.copy_(first[self._own(name)])
                tensor.grad = None
        torch.manual_seed(3)
        results = pytree.tree_leaves(function(*self.inputs))
        if any(result.requires_grad for result in results):
            sum(result.float().square().sum() for result in results).backward()
        found = {self._own(name): tensor.detach().clone() for name, tensor in tensors.items()}
        grads = {f"{self._own(name)}.grad": tensor.grad for name, tensor in tensors.items() if tensor.grad is not None}
        return [result.detach() for result in results], found | grads

    def _own(self, name: str) -> str:
        """Its name in the model, whoever is around it."""
        return next(own for own in self.state | self.mean if f".{name}".endswith(f".{own}"))


def same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(*(t.reshape(-1).view(torch.uint8) for t in (a, b)))


def assert_same(found: Any, expected: Any, gradients: bool = True) -> None:
    for result, wanted in zip(found[0], expected[0], strict=True):
        assert same(result, wanted)
    for name, wanted in expected[1].items():
        if gradients or not name.endswith(".grad"):
            # what the graph does not read, copies of it need not have
            assert (name not in found[1] and not name.endswith(".grad")) or same(found[1][name], wanted), name


#: Captured without inputs too: casts then ask at run time what there is to cast.
BLIND = ("mlp", "mask", "pieces", "batch norm in training", "regions", "O3")


CASES = {**{name: (name, True) for name in MODELS}, **{f"{name}, blind": (name, False) for name in BLIND}}


@pytest.fixture(scope="module", params=CASES.values(), ids=CASES)
def case(request) -> Case:
    return Case(*request.param)


def test_the_graph_module_gives_what_the_model_gives(case):
    assert_same(case.run(case.gm), case.expected)


@pytest.mark.parametrize("way", EXACT)
def test_copies_and_traces(case, way):
    assert_same(case.run(EXACT[way](case.gm, *case.inputs)), case.expected)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("way", [*RUNNERS, *VALUES])
def test_compilers(case, way):
    made = {**RUNNERS, **VALUES}[way](case.gm, *case.inputs)
    assert_same(case.run(made), case.expected, gradients=way in RUNNERS)


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        (cast_if_float, (torch.bfloat16,)),
        (cast_each, (torch.bfloat16,)),
        (cast_saturating, (torch.bfloat16,)),
        (write_out, (X,)),
        (rope, (X, X, 4)),
        (draw_seeds_like, (2,)),
        (batch_norm, (X, X)),
        (cross_entropy, (X,)),
        (check_dim, (2, 3, "2D or 3D")),
        (restored, (torch.bfloat16, X)),
        (write, ("add_", 1)),
    ],
)
def test_a_function_of_ours_is_one_node_of_any_trace(function, arguments):
    traced = fx.symbolic_trace(lambda x: function(x, *arguments))
    assert [node.target for node in traced.graph.nodes if node.target is function]
    again = pickled(fx.GraphModule(traced, traced.graph))  # of torch.fx's own kind: its source is traced
    assert [node.target for node in again.graph.nodes if node.target is function]


def test_a_checkpoint_is_one_too():
    body = fx.symbolic_trace(nn.ReLU())
    graph = fx.Graph()
    x, region = graph.placeholder("x"), graph.get_attr("body")
    graph.output(graph.call_function(checkpointed, (region, x)))
    again = pickled(fx.symbolic_trace(fx.GraphModule({"body": body}, graph)))
    assert checkpointed in [node.target for node in again.graph.nodes] and torch.equal(again(X), F.relu(X))


def test_the_nodes_and_what_the_passes_say_of_them_are_kept():
    case = Case("regions", True)
    for copied in (copy.deepcopy(case.gm), copy.copy(case.gm)):
        assert copied.code == case.gm.code and type(copied).__name__ == type(case.gm).__name__
        assert format_graph(copied) == format_graph(case.gm)
        copied(X)  # a region says what ran
        assert str(fxprec.report(copied).nodes) == str(fxprec.report(case.gm).nodes)
        assert copied.graph is not case.gm.graph and copied.training == case.gm.training


@pytest.mark.parametrize("save", [pickle.dumps, lambda gm: torch.save(gm, io.BytesIO())], ids=["pickle", "torch.save"])
@pytest.mark.parametrize("name", ["mlp", "regions"])
def test_a_graph_is_not_pickled_and_says_what_is(name, save):
    with pytest.raises(TypeError, match=r"pickle that model, .* or save what torch\.export\.export"):
        save(Case(name, True).gm)


def test_a_region_stays_one_call_in_a_trace():
    case = Case("regions", True)
    for traced in (fx.symbolic_trace(case.gm), fx.symbolic_trace(fx.symbolic_trace(case.gm))):
        (call,) = traced.graph.find_nodes(op="call_module")
        assert isinstance(traced.get_submodule(call.target), FusedRegion)


def test_features_are_those_of_the_graph_module():
    case = Case("mlp", True)
    names = [node.name for node in case.gm.graph.nodes if node.op == "call_function"][3:6]
    seen: dict[str, Tensor] = {}

    class Watching(fx.Interpreter):
        def run_node(self, n):
            seen[n.name] = super().run_node(n)
            return seen[n.name]

    Watching(case.gm).run(X)
    found = pickled(extracted(case.gm, *names))(X)
    assert found.keys() == set(names) and all(same(found[name], seen[name]) for name in names)


def test_a_model_around_keeps_its_own_nodes():
    case = Case("mlp", True)

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gm = case.gm

        def forward(self, x):
            return self.gm(self.gm(x)) * 2

    traced = pickled(fx.symbolic_trace(Two()))
    assert torch.equal(traced(X), case.gm(case.gm(X)) * 2) and "gm.0.weight" in traced.state_dict()


def test_a_tracer_may_be_given_keywords():
    case = Case("mask", True)
    x, mask = case.inputs

    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gm = case.gm

        def forward(self, x, mask):
            return self.gm(mask=mask, x=x)

    assert torch.equal(fx.symbolic_trace(Named())(x, mask), case.gm(x, mask))


def test_functions_that_torch_made_within_others():
    class Pooled(nn.Module):
        def forward(self, x):
            return F.max_pool1d(x, 2) + F.adaptive_max_pool1d(x, 4)

    for capture in ("symbolic", "dynamo"):
        model, _ = fxprec.convert(nn.Sequential(nn.Conv1d(4, 4, 1), Pooled()), dtype=torch.bfloat16, capture=capture)
        model(IMAGE)
        gm = fxprec.graph_module(model)
        for way in ("deepcopy", "symbolic_trace"):
            torch.manual_seed(1)
            expected = gm(IMAGE)
            torch.manual_seed(1)
            assert same(EXACT[way](gm, IMAGE)(IMAGE), expected)


def test_torch_jit_scripts_it():
    gm = Case("mlp", True).gm
    assert torch.equal(torch.jit.script(gm)(X), gm(X))


def test_torch_jit_scripts_calls_that_stand_for_torchs():
    """Depthwise convolutions and layer norms of a CPU are calls of ours, whose code TorchScript cannot compile."""
    model = nn.Sequential(nn.Conv2d(8, 8, 5, groups=8), nn.Flatten(), nn.LayerNorm(128), nn.Linear(128, 4))
    x = torch.randn(2, 8, 8, 8)
    gm = fxprec.graph_module(fxprec.convert(model, (x,), dtype=torch.bfloat16)[0])
    calls = {node.target.__name__ for node in gm.graph.nodes if hasattr(node.target, "torchs")}
    assert calls == {"depthwise_conv2d", "layer_norm"}
    torch.testing.assert_close(torch.jit.script(gm)(x), gm(x))


def test_each_has_code_of_its_own_for_dynamo():
    gms = [Case("mlp", True).gm for _ in range(2)]
    assert gms[0].forward.__code__ is not gms[1].forward.__code__
    assert inspect.signature(gms[0].forward) == inspect.signature(inspect.unwrap(gms[0].forward).__get__(gms[0]))


def test_hooks_and_attributes_of_the_user_come_along():
    gm = Case("mlp", True).gm
    gm.version = 3
    for copied in (copy.deepcopy(gm), copy.copy(gm)):
        assert copied.version == 3


def test_a_copy_shares_weights_and_a_deep_one_does_not():
    gm = Case("tied", True).gm
    weight = dict(gm.named_parameters())["a.weight"]
    assert dict(copy.copy(gm).named_parameters())["a.weight"] is weight
    own = dict(copy.deepcopy(gm).named_parameters(remove_duplicate=False))
    assert own["a.weight"] is own["b.weight"] and own["a.weight"] is not weight
    assert copy.copy(gm).add_module("more", nn.ReLU()) is None and not hasattr(gm, "more")


def test_sizes_that_dynamo_takes_for_inputs():
    model, _ = fxprec.convert(Pieces(), dtype=torch.bfloat16, capture="dynamo")
    for rows in (8, 5, 6):
        model(torch.randn(rows, 8))
    gm = fxprec.graph_module(model)
    assert len(gm.graph.find_nodes(op="placeholder")) == 1
    x = torch.randn(11, 8)
    for way in ("deepcopy", "symbolic_trace", "split_module", "Transformer"):
        assert torch.equal(pytree.tree_leaves(EXACT[way](gm, x)(x))[0], model(x))


def test_a_conversion_of_a_graph_without_gradients_keeps_that():
    case = Case("no_grad", True)
    again, _ = fxprec.convert(case.gm, (X,), dtype=torch.bfloat16)
    assert_same(case.run(again), case.expected)


def test_constants_stand_beside_those_of_the_model():
    """A graph module that is converted has constants of its own, under the names that a trace gives."""

    class Constants(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("_tensor_constant0", torch.full((8,), 5.0))
            self.register_buffer("_tensor_constant2", torch.full((8,), 7.0))

        def forward(self, x):
            made = torch.arange(8.0), torch.arange(8.0) * 2
            return x * made[0] + self._tensor_constant0 + made[1] * self._tensor_constant2

    expected = Constants()(X)
    model, _ = fxprec.convert(Constants(), level="O0")
    torch.testing.assert_close(model(X), expected)


def test_a_frozen_model_pickles():
    model, _ = fxprec.convert(mlp().eval(), (X,), dtype=torch.bfloat16)
    model(X).sum().backward()
    fxprec.freeze(model)
    assert all(parameter.grad is None for parameter in model.parameters())
    expected, gm = model(X), fxprec.graph_module(model)
    for copied in (pickled(model), fx.symbolic_trace(gm), torch.export.export(gm, (X,)).module()):
        assert same(copied(X), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_results_at_o3_are_as_the_model_gives_them(dtype):
    case = Case("O3", False)
    x = X.to(dtype)
    assert same(case.gm(x), case.model(x)) and case.gm(x).dtype is dtype
