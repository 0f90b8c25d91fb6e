"""Static capture: the graph computes what the module computes, bit for bit, and says where each node comes from."""

from __future__ import annotations

import contextlib
import copy
import inspect
import math
import operator
from collections import namedtuple
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import sqrt
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from function_module import as_module
from fxprec.capture.call_key import default_key
from fxprec.capture.capturing import CaptureDeclined
from fxprec.capture.symbolic.trace import StaticCapture, trace_static
from fxprec.capture.untouched import Contents
from fxprec.passes.graph.annotations import module_path


def capture(model: nn.Module | Callable[..., Any], *names: str, **constants: Any) -> StaticCapture:
    """With the default call pattern where nothing is said."""
    model = model if isinstance(model, nn.Module) else as_module(model)
    if names or constants:
        return trace_static(model, names, constants)
    names, pairs = default_key(inspect.signature(model.forward))
    return trace_static(model, names, dict(pairs))


def arguments_of(taken: StaticCapture) -> list[str]:
    return [str(node.target) for node in taken.gm.graph.find_nodes(op="placeholder")]


def assert_equal_runs(model: nn.Module, *inputs: Tensor, **constants: Any) -> StaticCapture:
    """Outputs, gradients and buffers of the capture and of the module, in two copies that start alike."""
    original = copy.deepcopy(model)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    names, pairs = default_key(inspect.signature(model.forward))
    taken = trace_static(model, names, {**dict(pairs), **constants})
    assert_same_tensors(before, model.state_dict())
    assert taken.guards.failing() is None
    torch.manual_seed(1)
    expected = original(*inputs, **constants)
    torch.manual_seed(1)
    got = taken.gm(*inputs)
    assert torch.equal(got, expected)
    assert_same_tensors(original.state_dict(), model.state_dict())
    if got.requires_grad:
        torch.autograd.backward([got, expected], [torch.ones_like(got)] * 2)
        assert_same_tensors(
            {name: p.grad for name, p in original.named_parameters() if p.grad is not None},
            {name: p.grad for name, p in model.named_parameters() if p.grad is not None},
        )
    return taken


def assert_same_tensors(expected: dict[str, Tensor], got: dict[str, Tensor]) -> None:
    assert expected.keys() == got.keys()
    for name, tensor in expected.items():
        assert torch.equal(got[name], tensor), name


def targets(taken: StaticCapture) -> list[Any]:
    return [node.target for node in taken.gm.graph.nodes if node.op.startswith("call")]


class SmallCNN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
        self.down = nn.Conv2d(8, 16, 3, stride=2)
        self.norm = nn.BatchNorm2d(16)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.drop = nn.Dropout(0.2)
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.down(self.stem(x))))
        return self.head(self.drop(torch.flatten(self.pool(x), 1)))


class ResidualMLP(nn.Module):
    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU()) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


class Attention(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.heads, self.dropout = heads, 0.1

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        b, t, c = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        scores = q @ k.transpose(-2, -1) / math.sqrt(k.size(-1))
        if mask is not None:
            scores = scores.masked_fill(mask == 0, float("-inf"))
        weights = F.dropout(F.softmax(scores, dim=-1), self.dropout if self.training else 0.0)
        return self.out((weights @ v).transpose(1, 2).reshape(b, t, c))


class Block(nn.Module):
    def __init__(self, dim: int = 8) -> None:
        super().__init__()
        self.attn, self.mlp = Attention(dim, 2), nn.Sequential(nn.Linear(dim, 16), nn.GELU(), nn.Linear(16, dim))
        self.ln1, self.ln2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.register_buffer("tri", torch.ones(16, 16).tril())

    def forward(self, x: Tensor, causal: bool = True) -> Tensor:
        mask = self.tri[: x.size(1), : x.size(1)] if causal else None
        x = x + self.attn(self.ln1(x), mask)
        return x + self.mlp(self.ln2(x))


class Fused(nn.Module):
    """Attention by torch's kernel, a position table, weights tied between the ends."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.position = nn.Embedding(11, 8), nn.Embedding(16, 8)
        self.qkv = nn.Linear(8, 24)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids) + self.position(torch.arange(ids.shape[1], device=ids.device))
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        return self.head(F.scaled_dot_product_attention(q, k, v, is_causal=True))


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (SmallCNN, (2, 3, 9, 9)),
        (ResidualMLP, (4, 8)),
        (Block, (2, 5, 8)),
        (lambda: nn.Sequential(nn.Linear(8, 2)), (3, 8)),
    ],
    ids=["cnn", "mlp", "block", "sequential"],
)
def test_runs_as_the_module(make: Callable[[], nn.Module], shape: tuple[int, ...], training: bool) -> None:
    assert_equal_runs(make().train(training), torch.randn(shape))


def test_token_model_with_tied_weights_reads_them_once() -> None:
    taken = assert_equal_runs(Fused(), torch.randint(0, 11, (2, 7)))
    weights = [node.target for node in taken.gm.graph.find_nodes(op="get_attr")]
    assert weights.count("table.weight") == 1 and "head.weight" not in weights


def test_any_shape_afterwards() -> None:
    model = Block()
    taken = capture(model)
    for length in (1, 3, 16):
        x = torch.randn(2, length, 8)
        torch.manual_seed(2)
        expected = model(x)
        torch.manual_seed(2)
        assert torch.equal(taken.gm(x), expected)


def test_weights_are_the_modules_own() -> None:
    model = SmallCNN()
    taken = capture(model)
    ours = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    read = [node for node in taken.gm.graph.find_nodes(op="get_attr")]
    assert {node.target for node in read} == ours.keys()
    for node in read:
        owner, _, name = node.target.rpartition(".")
        assert getattr(taken.gm.get_submodule(owner), name) is ours[node.target]
        assert node.meta["kind"] == ("parameter" if isinstance(ours[node.target], nn.Parameter) else "buffer")


def test_batch_counter_moves_when_the_graph_runs_not_before() -> None:
    model = nn.Sequential(nn.BatchNorm1d(4))
    taken = capture(model)
    assert model[0].num_batches_tracked == 0
    taken.gm(torch.randn(3, 4))
    taken.gm(torch.randn(3, 4))
    assert model[0].num_batches_tracked == 2


@pytest.mark.parametrize(
    ("norm", "shape"), [(nn.BatchNorm1d, (2, 3, 4, 5)), (nn.BatchNorm2d, (2, 3)), (nn.BatchNorm3d, (2, 3, 4, 5))]
)
def test_rank_check_of_a_batch_norm_survives(norm: type[nn.Module], shape: tuple[int, ...]) -> None:
    model = norm(3)
    gm = capture(model).gm
    gm.graph.eliminate_dead_code()
    gm.recompile()
    with pytest.raises(ValueError) as expected:
        model(torch.randn(shape))
    with pytest.raises(ValueError) as got:
        gm(torch.randn(shape))
    assert str(got.value) == str(expected.value)


def test_sync_batch_norm_in_eval() -> None:
    assert_equal_runs(nn.SyncBatchNorm(3).eval(), torch.randn(2, 3, 4))


def test_modules_of_torch_become_functionals() -> None:
    assert targets(capture(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Softmax(dim=1)))) == [
        torch._C._nn.linear,
        F.relu,
        F.softmax,
    ]


def test_module_paths_and_source_lines() -> None:
    gm = capture(SmallCNN()).gm
    paths = {module_path(node) for node in gm.graph.nodes if node.target is F.batch_norm}
    assert paths == {"stem.1", "norm"}
    head = next(node for node in gm.graph.nodes if node.target is torch._C._nn.linear)
    file, line = head.stack_trace.splitlines()
    assert file.startswith(f'File "{__file__}", line ') and file.endswith(", in forward")
    assert line.strip() == "return self.head(self.drop(torch.flatten(self.pool(x), 1)))"
    relu = next(node for node in gm.graph.nodes if node.target is F.relu and module_path(node) == "")
    assert relu.stack_trace.endswith("x = F.relu(self.norm(self.down(self.stem(x))))")


class Outer(nn.Module):
    """Modules of users around one of torch's: each node names the innermost line of a user's."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.inside = nn.Sequential(nn.ReLU(), Outer(depth - 1) if depth else nn.Tanh(), nn.Sigmoid())

    def forward(self, x: Tensor) -> Tensor:
        x = x * 2
        x = self.inside(x)
        return x + 1


def test_stack_traces_name_the_line_that_called_however_modules_are_nested() -> None:
    gm = trace_static(Outer(1), ("x",), {}).gm
    lines = [(node.name, node.stack_trace.splitlines()[1].strip()) for node in gm.graph.nodes if node.stack_trace]
    once = [("mul", "x = x * 2"), ("relu", "x = self.inside(x)")]
    twice = [(f"{name}_1", line) for name, line in once]
    assert lines == [
        *once, *twice, ("tanh", "x = self.inside(x)"), ("sigmoid", "x = self.inside(x)"), ("add", "return x + 1"),
        ("sigmoid_1", "x = self.inside(x)"), ("add_1", "return x + 1"),
    ]  # fmt: skip
    calls = {node.name: [*node.meta.get("nn_module_stack", ())] for node in gm.graph.nodes}
    assert calls["mul"] == calls["add_1"] == [] and calls["relu"] == ["inside", "inside.0"]
    assert calls["mul_1"] == calls["add"] == ["inside", "inside.1"]
    assert calls["tanh"] == ["inside", "inside.1", "inside.1.inside", "inside.1.inside.1"]
    assert calls["sigmoid_1"] == ["inside", "inside.2"]


def test_lines_and_modules_after_a_submodule_that_raised() -> None:
    class Refusing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            x = x.exp()
            raise KeyError("caught outside")

    class Catching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.refusing = Refusing()

        def forward(self, x: Tensor) -> Tensor:
            try:
                return self.refusing(x)
            except KeyError:
                return x + 1

    gm = trace_static(Catching(), ("x",), {}).gm
    lines = {node.name: node.stack_trace.splitlines()[1].strip() for node in gm.graph.nodes if node.stack_trace}
    assert lines == {"exp": "x = x.exp()", "add": "return x + 1"}


def test_the_stack_of_modules_is_what_fx_says_it_is() -> None:
    class Twice(nn.Module):
        """Calls one submodule twice, and itself once."""

        def __init__(self) -> None:
            super().__init__()
            self.act = nn.Sequential(nn.ReLU(), nn.Sigmoid())

        def forward(self, x: Tensor, again: bool = True) -> Tensor:
            x = self.act(self.act(x)) + 1
            return self(x, False) if again else x * 2

    ours = trace_static(Twice(), ("x",), {}).gm.graph
    tracer = fx.Tracer()
    tracer.is_leaf_module = lambda *_: False  # type: ignore[method-assign]
    theirs = tracer.trace(Twice(), {"again": True})
    stacks = [{node.name: node.meta.get("nn_module_stack") for node in graph.nodes} for graph in (ours, theirs)]
    assert stacks[0] == {name: stacks[1][name] for name in stacks[0]}  # theirs asserts that `again` is True, too
    assert [*stacks[0]["mul"]] == [""] and [*stacks[0]["sigmoid_1"]] == ["act@1", "act.1@1"]


class TestTorchFunctions:
    """Each way in which a call reaches a proxy is recorded as fx records it."""

    @pytest.mark.parametrize(
        "forward",
        [
            lambda x: torch.add(x, 2, alpha=3),
            lambda x: torch.add(input=x, other=2),
            lambda x: torch.add(2, x),
            lambda x: torch.cat([x, x], dim=-1),
            lambda x: torch.where(x > 0, x, 0.0),
            lambda x: x.exp().add(x, alpha=2),
            lambda x: F.gelu(x, approximate="tanh"),
            lambda x: F.linear(input=x, weight=x),
            lambda x: x.T @ x,
        ],
    )
    def test_it_is_recorded_as_by_fx(self, forward) -> None:
        ours = trace_static(as_module(forward), ("x",), {}).gm.graph
        theirs = fx.symbolic_trace(forward).graph
        assert [(n.op, n.name, n.target, str(n.args), str(n.kwargs)) for n in ours.nodes] == [
            (n.op, n.name, n.target, str(n.args), str(n.kwargs)) for n in theirs.nodes
        ]

    def test_a_traced_value_that_is_left_outside_is_taken_back(self) -> None:
        left: list[Tensor] = []

        class Keeping(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                left.append(x.cos())
                return torch.mul(x, left[0]) if self.training else torch.mul(left[0], x)

        with pytest.raises(CaptureDeclined, match="the forward writes the closure variable left"):
            trace_static(Keeping(), ("x",), {})
        assert left == []

    def test_a_traced_value_that_an_earlier_trace_left_behind(self, monkeypatch: pytest.MonkeyPatch) -> None:
        left: list[Tensor] = []

        class Keeping(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                left.append(x.cos())
                return torch.mul(x, left[0]) if self.training else torch.mul(left[0], x)

        model = Keeping()
        monkeypatch.setattr(Contents, "restore", lambda self: None)
        graph = trace_static(model, ("x",), {}).gm.graph
        nodes = len(graph.nodes)
        for mode in (True, False):
            with pytest.raises(CaptureDeclined, match=r"an earlier trace left behind, at .*left\[0\]"):
                trace_static(model.train(mode), ("x",), {})
        with pytest.raises(CaptureDeclined, match="earlier trace left behind"):
            left[0] * 2
        assert len(graph.nodes) == nodes


def test_tied_weights_live_where_the_first_of_them_does() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, bias=False))
    model[1].weight = model[0].weight
    owners = trace_static(model, ("input",), {}).owners
    assert {path: owner["weight"] is model[0].weight for path, owner in owners.items()} == {
        "0.weight": True, "0.bias": True,
    }  # fmt: skip
    assert all(owner is model[0]._parameters for owner in owners.values())


def test_models_of_torch_modules_only_have_source_lines_too() -> None:
    gm = capture(nn.Sequential(nn.Linear(2, 2))).gm
    linear = next(node for node in gm.graph.nodes if node.op == "call_function")
    assert "F.linear" in linear.stack_trace and module_path(linear) == "0"


class TestArguments:
    def test_optional_tensor_left_out_or_passed(self) -> None:
        model, x, mask = Attention(8, 2).eval(), torch.randn(2, 3, 8), torch.ones(3, 3).tril()
        without = capture(model)
        assert arguments_of(without) == ["x"] and "masked_fill" not in targets(without)
        assert torch.equal(without.gm(x), model(x))
        with_mask = capture(model, "x", "mask")
        assert arguments_of(with_mask) == ["x", "mask"]
        assert torch.equal(with_mask.gm(x, mask), model(x, mask))

    @pytest.mark.parametrize("causal", [True, False])
    def test_flag(self, causal: bool) -> None:
        taken = assert_equal_runs(Block().eval(), torch.randn(2, 3, 8), causal=causal)
        assert ("tri" in [node.target for node in taken.gm.graph.find_nodes(op="get_attr")]) is causal

    def test_function_with_defaults(self) -> None:
        def f(x: Tensor, /, w: Tensor, scale: float = 2.0, *, shift: float = 1.0) -> Tensor:
            return (x @ w) * scale + shift

        x, w = torch.randn(2, 3), torch.randn(3, 4)
        assert torch.equal(capture(f).gm(x, w), f(x, w))
        assert torch.equal(capture(f, "x", "w", shift=3.0).gm(x, w), f(x, w, shift=3.0))

    def test_argument_in_the_middle_left_out(self) -> None:
        def f(x: Tensor, mask: Tensor | None = None, y: Tensor | None = None) -> Tensor:
            return x if y is None else x + y

        assert torch.equal(capture(f, "x", "y").gm(torch.ones(2), torch.ones(2)), torch.full((2,), 2.0))

    def test_unknown_argument_is_an_error(self) -> None:
        with pytest.raises(TypeError, match="no argument 'z'"):
            trace_static(ResidualMLP(), ["z"], {})

    def test_function_of_math_imported_by_name(self) -> None:
        taken = capture(lambda x: x / sqrt(x.size(0)))
        assert sqrt in targets(taken) and torch.equal(taken.gm(torch.ones(4)), torch.full((4,), 0.5))

    def test_method_and_lambda(self) -> None:
        class Scaler:
            def apply(self, x: Tensor) -> Tensor:
                return x * 3

        x = torch.randn(3)
        with pytest.raises(CaptureDeclined, match=r"calls an object \(Scaler\) that may change inside"):
            capture(Scaler().apply)
        assert torch.equal(capture(lambda x: math.sqrt(4.0) * x).gm(x), 2 * x)


class TestResults:
    def test_nested(self) -> None:
        def f(x: Tensor) -> Any:
            return {"a": x + 1, "b": [x, (x * 2, None, 3)]}

        x = torch.randn(2)
        result = capture(f).gm(x)
        assert torch.equal(result["a"], x + 1)
        assert result["b"][0] is x and torch.equal(result["b"][1][0], x * 2) and result["b"][1][1:] == (None, 3)

    def test_namedtuple_and_dataclass(self) -> None:
        x = torch.randn(2)
        pair = capture(lambda x: Pair(x, x + 1)).gm(x)
        assert type(pair) is Pair and torch.equal(pair.b, x + 1)
        record = capture(lambda x: Record(x, x + 1)).gm(x)
        assert type(record) is Record and torch.equal(record.second, x + 1)


@torch.fx.wrap
def wrapped(x: Tensor) -> Tensor:
    return x @ x


Pair = namedtuple("Pair", "a b")


@dataclass
class Record:
    first: Tensor
    second: Tensor


class TestSemantics:
    """Where plain fx records something else than what happens."""

    def test_augmented_assignment_writes_in_place(self) -> None:
        def f(x: Tensor) -> Tensor:
            y = x * 1
            alias = y
            y += 1
            return alias

        taken = capture(f)
        assert operator.iadd in targets(taken)
        assert torch.equal(taken.gm(torch.ones(2)), torch.full((2,), 2.0))

    def test_augmented_assignment_of_a_number_rebinds(self) -> None:
        def f(x: Tensor) -> Tensor:
            n = x.shape[0]
            before = n
            n += 1
            return x * n * before

        assert torch.equal(capture(f).gm(torch.ones(3)), torch.full((3,), 12.0))

    def test_item_assignment(self) -> None:
        def f(x: Tensor) -> Tensor:
            y = x.clone()
            y[x > 0] = 7.0
            return y

        x = torch.randn(10)
        assert torch.equal(capture(f).gm(x), f(x))

    def test_isinstance_of_arguments_weights_and_results(self) -> None:
        class Asks(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.weight = nn.Parameter(torch.ones(2))
                self.register_buffer("shift", torch.ones(2))

            def forward(self, x: Tensor) -> Tensor:
                weight = isinstance(self.weight, nn.Parameter) and not isinstance(self.shift, nn.Parameter)
                certain = isinstance(x, Tensor) and torch.is_tensor(self.shift) and not isinstance(x, list | nn.Module)
                return x + 1 if weight and certain and isinstance(F.relu(x), Tensor) else x - 1

        assert_equal_runs(Asks(), torch.randn(2))

    def test_hasattr_of_a_weight(self) -> None:
        class Asks(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.weight = nn.Parameter(torch.ones(2))

            def forward(self, x: Tensor) -> Tensor:
                return x * (2 if hasattr(self.weight, "decompose") else self.weight)

        assert_equal_runs(Asks(), torch.randn(2))

    def test_shape_of_a_weight_steers(self) -> None:
        class Steers(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.weight = nn.Parameter(torch.randn(3, 2))

            def forward(self, x: Tensor) -> Tensor:
                rows, columns = self.weight.shape
                if self.weight.dim() == 2 and self.weight.size(0) > columns and len(self.weight) == rows:
                    return F.linear(x, self.weight.view(self.weight.numel() // 2, -1))
                return x

        assert_equal_runs(Steers(), torch.randn(4, 2))

    def test_constants_are_made_once(self) -> None:
        def f(x: Tensor) -> Tensor:
            mask = torch.triu(torch.full((3, 3), float("-inf")), diagonal=1)
            return (x + mask).softmax(-1) * torch.tensor(2.0)

        x = torch.randn(3, 3)
        gm = capture(f).gm
        assert torch.equal(gm(x), f(x))
        assert [node.meta["kind"] for node in gm.graph.find_nodes(op="get_attr")] == ["constant"] * 2

    def test_constant_made_under_inference_mode_can_be_saved_for_backward(self) -> None:
        with torch.inference_mode():
            gm = capture(lambda x: x * torch.tensor(2.0)).gm
        x = torch.ones(2, requires_grad=True)
        gm(x).sum().backward()
        assert torch.equal(x.grad, torch.full((2,), 2.0))

    def test_tensor_attribute_that_is_no_buffer(self) -> None:
        class Plain(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.scale = torch.tensor([2.0, 3.0])

            def forward(self, x: Tensor) -> Tensor:
                return x * self.scale

        model = Plain()
        taken = assert_equal_runs(model, torch.randn(2))
        assert taken.gm.scale is model.scale

    def test_parametrization_is_in_the_graph(self) -> None:
        model = torch.nn.utils.parametrizations.weight_norm(nn.Linear(3, 2))
        taken = assert_equal_runs(model, torch.randn(4, 3))
        assert torch._weight_norm in targets(taken)

    def test_decorated_forward(self) -> None:
        def doubled(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
            def wrapper(self: nn.Module, x: Tensor) -> Tensor:
                return forward(self, x) * 2

            return wrapper

        class Decorated(nn.Linear):
            forward = doubled(nn.Linear.forward)

        assert_equal_runs(Decorated(2, 2), torch.randn(2, 2))

    def test_functions_given_to_fx_wrap_are_traced_and_builtins_recorded(self) -> None:
        user: dict[str, Any] = {"torch": torch}
        exec("torch.fx.wrap('len')\ndef f(x):\n    return x * len(x)", user)
        taken, x = capture(lambda x: wrapped(user["f"](x))), torch.randn(3, 3)
        assert targets(taken) == [len, operator.mul, operator.matmul]
        assert torch.equal(taken.gm(x), (x * 3) @ (x * 3))
        assert fx.symbolic_trace(lambda x: wrapped(x)).graph.find_nodes(op="call_function", target=wrapped)

    def test_forward_set_on_the_instance(self) -> None:
        model = nn.Linear(2, 2)
        model.forward = lambda input: F.linear(input, model.weight) + 1
        x = torch.randn(1, 2)
        assert torch.equal(capture(model).gm(x), model(x))

    def test_unused_weights_and_submodules_stay_out(self) -> None:
        class Partial(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.used, self.unused, self.rnn = nn.Linear(2, 2), nn.Linear(2, 2), nn.LSTM(2, 2)

            def forward(self, x: Tensor) -> Tensor:
                return self.used(x) if self.unused.weight is not None else x

        taken = assert_equal_runs(Partial(), torch.randn(1, 2))
        assert {n.target for n in taken.gm.graph.find_nodes(op="get_attr")} == {"used.weight", "used.bias"}


class TestGraphModules:
    def test_traced_down_to_functionals_with_their_paths_and_lines(self) -> None:
        model = SmallCNN().eval()
        outer = fx.Tracer()
        outer.record_stack_traces = True
        gm = fx.GraphModule(model, outer.trace(model))
        assert gm.graph.find_nodes(op="call_module")
        taken = capture(gm)
        x = torch.randn(2, 3, 9, 9)
        assert torch.equal(taken.gm(x), model(x))
        assert not taken.gm.graph.find_nodes(op="call_module")
        norms = [node for node in taken.gm.graph.nodes if node.target is F.batch_norm]
        assert [module_path(node) for node in norms] == ["stem.1", "norm"]
        assert "x = F.relu(self.norm(self.down(self.stem(x))))" in norms[1].stack_trace

    def test_without_any_meta(self) -> None:
        graph = fx.Graph()
        graph.output(graph.call_module("0", (graph.placeholder("x"),)))
        model = nn.Sequential(nn.Linear(2, 2))
        taken = capture(fx.GraphModule(model, graph))
        linear = next(node for node in taken.gm.graph.nodes if node.op == "call_function")
        assert module_path(linear) == "0" and "F.linear" in linear.stack_trace

    def test_as_a_submodule(self) -> None:
        assert_equal_runs(nn.Sequential(fx.symbolic_trace(ResidualMLP()), nn.Linear(8, 2)), torch.randn(2, 8))

    def test_exported_program(self) -> None:
        x = torch.randn(2, 8)
        program = torch.export.export(ResidualMLP(), (x,))
        taken = capture(program.module(), "x")
        assert torch.equal(taken.gm(x), program.module()(x))

    def test_result_copies(self) -> None:
        gm, x = capture(SmallCNN().eval()).gm, torch.randn(2, 3, 9, 9)
        for again in (copy.deepcopy(gm), copy.copy(gm)):
            assert torch.equal(again(x), gm(x))


def test_a_declined_trace_leaves_the_contexts_it_was_interrupted_in() -> None:
    """A generator that nobody ended would keep its hooks for as long as somebody keeps the error."""
    inner = nn.Linear(4, 4)

    @contextlib.contextmanager
    def halves() -> Iterator[None]:
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x.half(), lambda x: x.float()):
            yield

    class Interrupted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = inner

        def forward(self, x: Tensor) -> Tensor:
            saving = halves()
            saving.__enter__()  # as checkpoints of torch 2.11 do: what is raised inside passes it by
            y = self.fc(x)
            if y.sum() > 0:
                y = y * 2
            saving.__exit__(None, None, None)
            return y

    kept = []
    try:
        trace_static(Interrupted(), ("x",), {})
    except CaptureDeclined as error:
        kept.append(error)
    assert kept and torch._C._autograd._top_saved_tensors_default_hooks(False) is None
