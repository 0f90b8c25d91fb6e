"""Random programs through the whole pipeline: invariants, dtypes, values, gradients, and the same answer every time.

A program is a list of steps over values of shape (2, 3, 4): layers, norms, pointwise and in-place ops, views, writes to
parts, casts, masks, integers and several results. Masks and indices come from the inputs, whose values no dtype rounds.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.fx import GraphModule, Interpreter, Node
from torch.utils import _pytree as pytree

from fxprec.capture.trace import trace_static
from fxprec.passes.casts import CASTS
from fxprec.passes.context import Context
from fxprec.passes.ir import format_graph
from fxprec.passes.policy import Policy
from fxprec.passes.runner import run_passes
from fxprec.shapes import propagate_shapes
from fxprec.testing import assert_annotations_hold

FP32, FP64, BF16, FP16 = torch.float32, torch.float64, torch.bfloat16, torch.float16


@dataclass
class Values:
    """What a program has made so far: ``floats`` are (value, dtype in the original program)."""

    model: Any
    floats: list[tuple[Any, torch.dtype]]
    masks: list[Any]
    indices: list[Any]

    def any(self, at: int) -> tuple[Any, torch.dtype]:
        """The latest at 0."""
        return self.floats[-1 - at % len(self.floats)]

    def fp32(self, at: int) -> Any:
        chosen = [value for value, dtype in self.floats if dtype is FP32]
        return chosen[-1 - at % len(chosen)]

    def mask(self, at: int) -> Any:
        return self.masks[at % len(self.masks)]

    def index(self, at: int) -> Any:
        return self.indices[at % len(self.indices)]

    def add(self, value: Any, dtype: torch.dtype = FP32) -> None:
        self.floats.append((value, dtype))


Step = Callable[[Values, int, int], None]


def fp32(function: Callable[[Any, Any], Any]) -> Step:
    """An op on one FP32 value: ``function(model, x)``."""
    return lambda values, a, b: values.add(function(values.model, values.fp32(a)))


def unary(function: Callable[[Any], Any]) -> Step:
    """An op on one value of any float dtype that keeps it."""

    def step(values: Values, a: int, b: int) -> None:
        value, dtype = values.any(a)
        values.add(function(value), dtype)

    return step


def binary(function: Callable[[Any, Any], Any]) -> Step:
    def step(values: Values, a: int, b: int) -> None:
        (x, first), (y, second) = values.any(a), values.any(b)
        values.add(function(x, y), torch.promote_types(first, second))

    return step


def to(dtype: torch.dtype, function: Callable[[Any], Any]) -> Step:
    """A user's cast."""
    return lambda values, a, b: values.add(function(values.any(a)[0]), dtype)


def write(function: Callable[[Any, Any], Any]) -> Step:
    """An in-place op; what it returns (the target) counts as a value too."""

    def step(values: Values, a: int, b: int) -> None:
        (target, dtype), (other, _) = values.any(a), values.any(b)
        result = function(target, other)
        if result is not None:
            values.add(result, dtype)

    return step


def same(function: Callable[[Any, Any], Any]) -> Step:
    """An op whose kernel wants two values of one dtype: FP32 in the original program."""
    return lambda values, a, b: values.add(function(values.fp32(a), values.fp32(b)))


def masked(function: Callable[[Any, Any, Any], Any]) -> Step:
    def step(values: Values, a: int, b: int) -> None:
        values.add(function(values.fp32(a), values.fp32(b), values.mask(a + b)))

    return step


def indexed(function: Callable[[Any, Any, Any], Any]) -> Step:
    def step(values: Values, a: int, b: int) -> None:
        values.add(function(values.fp32(a), values.fp32(b), values.index(a + b)))

    return step


def _swap_halves(x: Any) -> Any:
    first, second = x.chunk(2, -1)
    return torch.cat([second, first], -1)


def _swap_halves_of_tuple(x: Any) -> Any:
    halves = torch.split(x, 2, -1)
    return torch.cat([halves[1], halves[0]], -1)


def _tuple_as_it_is(x: Any) -> Any:
    return torch.stack(x.unbind(1), 1)


def _set_row(x: Any, y: Any) -> None:
    x[:, 0] = y[:, 1]


def _set_masked(x: Any, y: Any) -> None:
    x[:, :, 0] = 0.25


def _scale_part(x: Any, y: Any) -> None:
    x[:, 1:].mul_(0.5)


def _add_to_part(x: Any, y: Any) -> None:
    part = x.transpose(1, 2)[:, 2:]
    part += y.transpose(1, 2)[:, :2]


def _attention(model: Any, x: Any) -> Any:
    scores = x @ x.transpose(1, 2) * 0.5
    return scores.softmax(-1) @ x


def _masked_attention(x: Any, y: Any, mask: Any) -> Any:
    scores = (x @ y.transpose(1, 2)).masked_fill(mask[:, :, :3], torch.finfo(torch.float32).min)
    return scores.softmax(-1) @ y


def _normalize(x: Any) -> Any:
    return (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True) + 0.1).sqrt()


STEPS: dict[str, Step] = {
    "linear": fp32(lambda model, x: F.linear(x, model.weight, model.bias)),
    "linear_shared": fp32(lambda model, x: F.linear(x, model.weight)),
    "matmul": fp32(lambda model, x: x @ model.weight),
    "conv1d": fp32(lambda model, x: F.conv1d(x, model.kernel, padding=1)),
    "addmm": fp32(lambda model, x: torch.addmm(model.bias, x.reshape(6, 4), model.weight).view(2, 3, 4)),
    "baddbmm": same(lambda x, y: torch.baddbmm(x, x[:, :, :3], y)),
    "bmm": same(lambda x, y: torch.bmm(x[:, :, :3], y)),
    "einsum": fp32(lambda model, x: torch.einsum("btd,de->bte", x, model.weight)),
    "attention": fp32(_attention),
    "masked_attention": masked(_masked_attention),
    "layer_norm": fp32(lambda model, x: F.layer_norm(x, (4,), model.gain, model.bias, 0.1)),
    "group_norm": fp32(lambda model, x: F.group_norm(x, 3, eps=0.1)),
    "batch_norm": fp32(lambda model, x: F.batch_norm(x, model.mean, model.var, training=True, eps=0.1)),
    "rms_norm": fp32(lambda model, x: F.rms_norm(x, (4,), eps=0.1)),
    "normalize": unary(_normalize),
    "softmax": unary(lambda x: x.softmax(-1)),
    "log_softmax": unary(lambda x: F.log_softmax(x, -1)),
    "gelu": unary(F.gelu),
    "relu": unary(torch.relu),
    "tanh": unary(torch.tanh),
    "exp": unary(lambda x: torch.exp(x.tanh())),
    "dropout": unary(lambda x: F.dropout(x, 0.0)),
    "dropout_eval": unary(lambda x: F.dropout(x, 0.5, training=False)),
    "add": binary(lambda x, y: x + y),
    "sub": binary(torch.sub),
    "mul": binary(lambda x, y: x * y.tanh()),
    "div": binary(lambda x, y: x / (y * y + 1)),
    "maximum": binary(torch.maximum),
    "add_number": unary(lambda x: x + 0.5),
    "halve": unary(lambda x: x * 0.5),
    "add_one": unary(lambda x: 1 + x),
    "sqrt": unary(lambda x: (x.abs() + 1e-3).sqrt()),
    "cat": binary(lambda x, y: torch.cat([x, y], -1)[..., 2:6]),
    "stack": binary(lambda x, y: torch.stack([x, y]).mean(0)),
    "halves": unary(_swap_halves),
    "split": unary(_swap_halves_of_tuple),
    "unbind": unary(_tuple_as_it_is),
    "max_dim": unary(lambda x: x.max(-1, keepdim=True)[0] - x),
    "topk": unary(lambda x: x.topk(4).values),
    "sum": unary(lambda x: x - x.sum(-1, keepdim=True) * 0.25),
    "mean_all": unary(lambda x: x + x.mean()),
    "amax": unary(lambda x: x - x.amax(1, keepdim=True)),
    "cumsum": unary(lambda x: x.cumsum(1) * 0.5),
    "where": masked(lambda x, y, mask: torch.where(mask, x, y)),
    "where_number": masked(lambda x, y, mask: torch.where(mask, x, 0.125)),
    "masked_fill": masked(lambda x, y, mask: x.masked_fill(mask, -0.5)),
    "mask_times": masked(lambda x, y, mask: x * mask),
    "embedding": lambda values, a, b: values.add(F.embedding(values.index(a), values.model.table)),
    "gather": indexed(lambda x, y, index: x.gather(2, index[..., None].expand(2, 3, 4))),
    "scatter_add": indexed(lambda x, y, index: x.scatter_add(2, index[..., None], y)),
    "index_add": indexed(lambda x, y, index: x.index_add(1, index[0] % 3, y)),
    "index_put": indexed(lambda x, y, index: x.index_put((index[:, 0] % 2,), y)),
    "int_add": indexed(lambda x, y, index: x + index[..., None]),
    "lerp": same(lambda x, y: torch.lerp(x, y, 0.25)),
    "one_hot": lambda values, a, b: values.add(F.one_hot(values.index(a), 4) * values.fp32(b)),
    "view": unary(lambda x: x.view(6, 4).view(2, 3, 4)),
    "reshape": unary(lambda x: x.reshape(-1).reshape(2, 3, 4)),
    "transpose": unary(lambda x: x.transpose(1, 2).transpose(1, 2)),
    "slice": unary(lambda x: x[:, :]),
    "contiguous": unary(lambda x: x.contiguous()),
    "clone": unary(torch.clone),
    "detach": unary(lambda x: x.detach()),
    "float": to(FP32, lambda x: x.float()),
    "to_float": to(FP32, lambda x: x.to(torch.float32)),
    "double": to(FP64, lambda x: x.double()),
    "bfloat16": to(BF16, lambda x: x.bfloat16()),
    "half": to(FP16, lambda x: x.to(torch.float16)),
    "zeros_like": unary(torch.zeros_like),
    "new_ones": unary(lambda x: x.new_ones(2, 3, 4)),
    "add_": write(lambda x, y: x.add_(y)),
    "iadd": write(operator.iadd),
    "mul_": write(lambda x, y: x.mul_(0.5)),
    "relu_": write(lambda x, y: x.relu_()),
    "relu_inplace": write(lambda x, y: F.relu(x, inplace=True)),
    "tanh_": write(lambda x, y: torch.tanh_(x)),
    "exp_": write(lambda x, y: x.tanh_().exp_()),
    "clamp_": write(lambda x, y: x.clamp_(-1, 1)),
    "copy_": write(lambda x, y: x.copy_(y)),
    "zero_": write(lambda x, y: x.zero_()),
    "set_row": write(_set_row),
    "set_masked": write(_set_masked),
    "scale_part": write(_scale_part),
    "add_to_part": write(_add_to_part),
}


class Model(nn.Module):
    """Runs the steps; returns the last values, and the one that steps write to most."""

    def __init__(self, steps: list[tuple[str, int, int]], returned: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        shapes = {"weight": (4, 4), "bias": (4,), "kernel": (3, 3, 3), "table": (4, 4), "gain": (4,)}
        for name, shape in shapes.items():
            setattr(self, name, nn.Parameter(torch.randn(shape, generator=generator) * 0.5))
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("var", torch.ones(3))
        self.steps = tuple(steps)
        self.returned = returned

    def extra_repr(self) -> str:
        return f"{list(self.steps)}, {self.returned}"

    def forward(self, x: Any, y: Any, index: Any) -> Any:
        values = Values(self, [], [x > 0.1, y <= 0.0], [index, (x + 4).argmax(-1)])
        values.floats = [(x * 1.0, FP32), (y, FP32), (x, FP32)]
        for name, a, b in self.steps:
            STEPS[name](values, a, b)
        return [value for value, _ in values.floats[-self.returned :]], values.floats[0][0]


def programs(names: Iterable[str]) -> st.SearchStrategy[Model]:
    steps = st.tuples(st.sampled_from(sorted(names)), st.integers(0, 5), st.integers(0, 5))
    return st.builds(Model, st.lists(steps, min_size=1, max_size=10), st.integers(1, 3))


PROGRAMS = programs(STEPS)
#: Without rounding of the user's own.
FP32_PROGRAMS = programs(STEPS.keys() - {"bfloat16", "half"})
CONTEXTS = st.builds(
    lambda level, **settings: Context(policy=Policy.preset(level), **settings),
    level=st.sampled_from(["O1", "O2", "O3"]),
    low=st.sampled_from([BF16, FP16]),
    placement=st.sampled_from(["mincut", "autocast"]),
    native_mixed=st.booleans(),
)
FEW = settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    """Values that both low dtypes hold exactly: no mask or index depends on rounding."""
    generator = torch.Generator().manual_seed(2)
    x, y = (torch.randint(-8, 9, (2, 3, 4), generator=generator) / 8 for _ in range(2))
    return x, y, torch.randint(0, 4, (2, 3), generator=generator)


def expected(model: Model) -> list[Tensor]:
    """What eager gives; programs that it refuses, or that leave the numbers, are no programs."""
    try:
        with torch.no_grad():
            values = pytree.tree_leaves(copy.deepcopy(model)(*inputs()))
    except RuntimeError:
        assume(False)
    assume(all(value.isfinite().all() for value in values))
    return values


def rewrite(model: Model, context: Context, *, known: bool = False, shapes: bool = False) -> GraphModule:
    gm = trace_static(model, ("x", "y", "index"), {}).gm
    if shapes:
        assert propagate_shapes(gm, inputs())
    for node, tensor in zip(gm.graph.find_nodes(op="placeholder"), inputs() if known else (), strict=known):
        node.meta["dtype"] = tensor.dtype
    return run_passes(gm, context)


class Unrounded(Interpreter):
    """A rewritten graph whose casts, ours alone, copy where they convert, and do not round."""

    def run_node(self, n: Node) -> Any:
        if n.target not in CASTS:
            return super().run_node(n)
        (source, dtype), _ = self.fetch_args_kwargs_from_env(n)
        if n.args[0].meta["precision"].output is dtype:  # type: ignore[union-attr]
            return source  # guarded: of a dtype nobody knew
        return pytree.tree_map_only(Tensor, torch.clone, source)


@given(PROGRAMS, CONTEXTS, st.booleans())
@FEW
def test_dtypes_are_those_of_the_program_and_of_the_annotations(model: Model, context: Context, shapes: bool) -> None:
    wanted = expected(model)
    gm = rewrite(model, context, known=True, shapes=shapes)
    assert_annotations_hold(gm, *inputs())
    assert [value.dtype for value in pytree.tree_leaves(gm(*inputs()))] == [value.dtype for value in wanted]


@given(FP32_PROGRAMS, CONTEXTS)
@FEW
def test_casts_are_the_only_change(model: Model, context: Context) -> None:
    """Where casts do not round, values, gradients and what was written to inputs and buffers are the program's."""
    expected(model)
    twin = copy.deepcopy(model)
    try:
        original = everything(model, model)
    except RuntimeError:  # its backward wants what was written over
        assume(False)
    rewritten = everything(twin, Unrounded(rewrite(twin, context)).run)
    torch.testing.assert_close(rewritten, original, rtol=1e-5, atol=1e-6)


def everything(model: Model, call: Callable[..., Any]) -> list[Any]:
    x, y, index = inputs()
    leaves = x.requires_grad_(), y.requires_grad_()
    arguments = x.clone(), y.clone(), index
    values = pytree.tree_leaves(call(*arguments))
    differentiable = [value.double().sum() for value in values if value.requires_grad]
    if differentiable:
        sum(differentiable).backward()  # type: ignore[union-attr]
    return [values, arguments, list(model.buffers()), [p.grad for p in (*leaves, *model.parameters())]]


@given(PROGRAMS, CONTEXTS)
@FEW
def test_dtypes_without_knowing_those_of_the_inputs(model: Model, context: Context) -> None:
    wanted = expected(model)
    outputs = pytree.tree_leaves(rewrite(model, context)(*inputs()))
    assert [value.dtype for value in outputs] == [value.dtype for value in wanted]


@given(PROGRAMS)
@FEW
def test_level_o0_changes_nothing(model: Model) -> None:
    wanted = expected(model)
    gm = rewrite(model, Context(low=BF16, policy=Policy.preset("O0")))
    with torch.no_grad():
        assert all(map(torch.equal, pytree.tree_leaves(gm(*inputs())), wanted))


@given(PROGRAMS, CONTEXTS)
@settings(FEW, max_examples=30)
def test_the_same_program_gives_the_same_graph(model: Model, context: Context) -> None:
    expected(model)
    assert format_graph(rewrite(model, context, shapes=True)) == format_graph(rewrite(model, context, shapes=True))
