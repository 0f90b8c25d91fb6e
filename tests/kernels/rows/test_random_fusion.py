"""Random programs with and without fusion: the same values, dtypes, gradients and writes; regions are convex.

``fuse="aten"`` runs the very ops, so that results are equal bit for bit. Kernels run in Triton's interpreter, in FP32
and in float16, where their error against the program in float64 is no larger than that of the ops.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

import kernel_tools
import region_tools
from fxprec.capture.symbolic.trace import propagate_shapes, trace_static
from fxprec.kernels.rows.run.region import FusedRegion
from fxprec.passes.context import Context
from fxprec.passes.graph.subgraphs import every_graph
from fxprec.passes.policy.policy import Policy
from fxprec.passes.runner import run_passes

on_devices = pytest.mark.parametrize("device", kernel_tools.DEVICES)
outside = pytest.mark.skipif(kernel_tools.INTERPRETING, reason="wants to be outside of the interpreter")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::UserWarning"),
]  # of the interpreter

Made = list[Any]
#: (the program's own weights, an earlier value, another one) -> value of shape (2, 3, 4)
Step = Callable[[Any, Any, Any], Any]


def _written(x: Any, function: Callable[[Any], Any]) -> Any:
    fresh = F.relu(x) + 0.5
    function(fresh)
    return fresh


def _written_view(x: Any, y: Any) -> Any:
    fresh = x * 2
    part = fresh.view(6, 4)
    fresh.add_(y)
    return fresh + part.view(2, 3, 4)


def _twice(x: Any, y: Any) -> Any:
    fresh = x + y
    before = fresh * 2
    fresh.mul_(0.5)
    fresh.relu_()
    return fresh.view(6, 4).view(2, 3, 4) + before


STEPS: dict[str, Step] = {
    "linear": lambda model, x, y: F.linear(x, model.weight, model.bias),
    "linear_alone": lambda model, x, y: F.linear(x, model.weight),
    "linear_viewed": lambda model, x, y: F.linear(x, model.weight, model.bias).view(6, 4).view(2, 3, 4),
    "addmm": lambda model, x, y: torch.addmm(model.bias, x.reshape(6, 4), model.weight).view(2, 3, 4),
    "conv": lambda model, x, y: F.conv1d(x, model.kernel, model.channels, padding=1),
    "bmm": lambda model, x, y: torch.bmm(x[:, :, :3], y),
    "transpose": lambda model, x, y: x.reshape(2, 4, 3).transpose(1, 2),
    "slice": lambda model, x, y: torch.cat([x[..., 2:], x[..., :2]], -1),
    "add": lambda model, x, y: x + y,
    "sub": lambda model, x, y: torch.sub(x, y, alpha=0.5),
    "mul": lambda model, x, y: x * y,
    "where": lambda model, x, y: torch.where(x > y, x, 0.25),
    "mask": lambda model, x, y: y * (x > 0) + x,
    "mask_of_masks": lambda model, x, y: x * ((x > 0.5) + (y > 0)),
    "masked_fill": lambda model, x, y: x.masked_fill(y > 0, -0.5),
    "clamp": lambda model, x, y: x.clamp(-1.0, 1.0),
    "gelu": lambda model, x, y: F.gelu(x),
    "silu": lambda model, x, y: F.silu(x),
    "relu": lambda model, x, y: torch.relu(x),
    "tanh": lambda model, x, y: x.tanh(),
    "exp": lambda model, x, y: (-x * x).exp(),
    "softmax": lambda model, x, y: x.softmax(-1),
    "log_softmax": lambda model, x, y: F.log_softmax(x, -1),
    "softmax_rows": lambda model, x, y: x.softmax(1),
    "layer_norm": lambda model, x, y: F.layer_norm(x, (4,), model.gain, model.bias, 0.1),
    "layer_norm_2": lambda model, x, y: F.layer_norm(x, (3, 4), eps=0.1),
    "rms_norm": lambda model, x, y: F.rms_norm(x, (4,), model.gain, 0.1),
    "mean": lambda model, x, y: x - x.mean(-1, keepdim=True),
    "mean_2": lambda model, x, y: x - x.mean((-2, -1), keepdim=True),
    "mean_dropped": lambda model, x, y: x + (y * 2).mean(-1).tanh().unsqueeze(-1),
    "mean_of_all": lambda model, x, y: x * x.mean() + 1,
    "var": lambda model, x, y: x * (x.var(-1, keepdim=True) + 1).rsqrt(),
    "amax": lambda model, x, y: x - x.amax(-1, keepdim=True),
    "scale": lambda model, x, y: x * model.scale.tanh(),
    "columns": lambda model, x, y: x * (model.gain.exp() * 0.5),
    "rows": lambda model, x, y: x + (y.mean(-1, keepdim=True) * 2).sigmoid(),
    "grow": lambda model, x, y: x + (model.gain * 2).expand(3, 4),
    "dropout_eval": lambda model, x, y: F.dropout(x, 0.5, training=False),
    "contiguous": lambda model, x, y: x.contiguous(),
    "clone": lambda model, x, y: x.clone(),
    "detach": lambda model, x, y: x.detach() * x,
    "float": lambda model, x, y: x.float(),
    "half": lambda model, x, y: x.half().float(),
    "index": lambda model, x, y: x + (model.index == 2),
    "integers": lambda model, x, y: x * model.index,
    "relu_": lambda model, x, y: _written(x, lambda fresh: fresh.relu_()),
    "relu_inplace": lambda model, x, y: _written(x, lambda fresh: F.relu(fresh, inplace=True)),
    "masked_fill_": lambda model, x, y: _written(x, lambda fresh: fresh.masked_fill_(y > 0, 0.125)),
    "iadd": lambda model, x, y: _written(x, lambda fresh: fresh.__iadd__(y)),
    "part_": lambda model, x, y: _written(x, lambda fresh: fresh[:, 1:].mul_(0.5)),
    "written_view": lambda model, x, y: _written_view(x, y),
    "twice": lambda model, x, y: _twice(x, y),
    "mul_": lambda model, x, y: x.mul_(0.5),
    "add_": lambda model, x, y: x.add_(y),
    "buffer_": lambda model, x, y: model.seen.add_(x.detach().sum()) * 0.125 + y,
    "dead": lambda model, x, y: (F.relu(x) + 1, x)[1],
}


class Model(nn.Module):
    """Runs the steps on the values made so far, the latest at 0; returns the last ones."""

    def __init__(self, steps: list[tuple[str, int, int]], returned: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        shapes = {"weight": (4, 4), "bias": (4,), "kernel": (3, 3, 3), "channels": (3,), "gain": (4,), "scale": ()}
        for name, shape in shapes.items():
            setattr(self, name, nn.Parameter(torch.randn(shape, generator=generator) * 0.5))
        self.register_buffer("index", torch.tensor([0, 1, 2, 3]))
        self.register_buffer("seen", torch.zeros(()))
        self.steps, self.returned = tuple(steps), returned

    def extra_repr(self) -> str:
        return f"{list(self.steps)}, {self.returned}"

    def forward(self, x: Any, y: Any) -> Any:
        made = [y * 1.0, x, y]
        for name, a, b in self.steps:
            made.append(STEPS[name](self, made[-1 - a % len(made)], made[-1 - b % len(made)]))
        return made[-self.returned :]


def programs(names: list[str]) -> st.SearchStrategy[Model]:
    steps = st.tuples(st.sampled_from(names), st.integers(0, 4), st.integers(0, 4))
    return st.builds(Model, st.lists(steps, min_size=2, max_size=10), st.integers(1, 3))


PROGRAMS = programs(sorted(STEPS))
CONTEXTS = st.builds(
    lambda level, **options: Context(policy=Policy.preset(level), **options),
    level=st.sampled_from(["O1", "O2"]),
    low=st.sampled_from([torch.bfloat16, torch.float16]),
    device=st.sampled_from(["cpu", "cuda"]),  # of the latter only its kernels' abilities are asked
)
FEW = settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


def inputs() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    x, y = (torch.randint(-8, 9, (2, 3, 4), generator=generator) / 8 for _ in range(2))
    return x, y


def rewrite(model: Model, context: Context, shapes: bool) -> GraphModule:
    gm = trace_static(model, ("x", "y"), {}).gm
    if shapes:
        device = model.scale.device
        assert propagate_shapes(gm, tuple(x.to(device) for x in inputs()))
    return run_passes(gm, context)


def everything(
    model: Model, call: Callable[..., Any], dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> list[Any]:
    """Values, inputs and buffers afterwards, gradients of inputs and parameters."""
    model.zero_grad()
    leaves = [value.to(device, dtype).requires_grad_() for value in inputs()]
    arguments = [leaf.clone() for leaf in leaves]
    values = pytree.tree_leaves(call(*arguments))
    differentiable = [value.double().sum() for value in values if value.requires_grad]
    if differentiable:
        sum(differentiable).backward()  # type: ignore[union-attr]
    gradients = [None if p.grad is None else p.grad.clone() for p in (*leaves, *model.parameters())]
    return [values, arguments, [buffer.clone() for buffer in model.buffers()], gradients]


def original(model: Model, dtype: torch.dtype = torch.float32) -> list[Any]:
    """What eager gives; programs that it refuses, or that leave the numbers, are no programs."""
    model = copy.deepcopy(model).to(dtype)
    try:
        found = everything(model, model, dtype)
    except RuntimeError:
        assume(False)
    assume(all(value.isfinite().all() for value in pytree.tree_leaves(found) if isinstance(value, Tensor)))
    return found


def regions_of(gm: GraphModule) -> list[FusedRegion]:
    return [module for graph in every_graph(gm) for module in graph.modules() if isinstance(module, FusedRegion)]


def both(model: Model, context: Context, shapes: bool) -> tuple[list[Any], list[Any]]:
    """``everything`` with regions and without."""
    original(model)
    twin = copy.deepcopy(model)
    gm, plain = (rewrite(m, c, shapes) for m, c in ((model, replace(context, regions="aten")), (twin, context)))
    try:
        wanted = everything(twin, plain)
    except RuntimeError:  # its backward wants what was written over
        assume(False)
    return everything(model, gm), wanted


@pytest.mark.slow
@outside
@given(PROGRAMS, CONTEXTS, st.booleans())
@FEW
def test_regions_that_run_op_by_op_change_no_bit(model: Model, context: Context, shapes: bool) -> None:
    found, wanted = both(model, context, shapes)
    for own, other in zip(pytree.tree_leaves(found[:3]), pytree.tree_leaves(wanted[:3]), strict=True):
        assert own.dtype is other.dtype and own.shape == other.shape and own.stride() == other.stride()
        assert torch.equal(own.nan_to_num(), other.nan_to_num())


@pytest.mark.slow
@outside
@given(PROGRAMS, st.booleans())
@FEW
def test_nor_any_gradient(model: Model, shapes: bool) -> None:
    """Up to the order in which several are added: hence in FP32."""
    found, wanted = both(model, Context(low=torch.bfloat16, policy=Policy.preset("O0")), shapes)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@outside
def test_every_row_operation_joins_a_region() -> None:
    alone = set()
    for name in STEPS:
        model = Model([("add", 0, 1), (name, 0, 1), ("relu", 0, 0)], 1)
        gm = rewrite(model, Context(low=torch.bfloat16, policy=Policy.preset("O1"), regions="aten"), shapes=True)
        if not any("add" in region.name for region in regions_of(gm)):
            alone.add(name)
    others = {"bmm", "transpose", "slice"}  # no row operations
    assert alone == others | {"softmax_rows", "detach", "written_view"}


@pytest.mark.slow
def test_the_kernels_in_the_interpreter() -> None:
    kernel_tools.run_in_the_interpreter(__file__)


#: Without what rounding decides: which of equal values is the largest; and a gradient that the user's cast rounds.
CONTINUOUS = sorted(STEPS.keys() - {"amax", "half"})
#: Without comparisons either, which low precision decides otherwise.
SMOOTH = programs([name for name in CONTINUOUS if not name.startswith(("where", "mask"))])
KERNELS = settings(FEW, max_examples=20)
TRITON = Context(low=torch.float16, policy=Policy.preset("O0"), device="cuda", regions="triton")


@on_devices
@given(model=programs(CONTINUOUS))
@example(model=Model([("conv", 0, 0), ("rows", 1, 0)], 1))  # one gradient for all columns of what has none
@example(model=Model([("mask_of_masks", 4, 3), ("silu", 2, 3), ("mask_of_masks", 3, 0), ("mask_of_masks", 0, 0)], 1))
@KERNELS
def test_regions_that_run_as_kernels_compute_the_same(model: Model, device: str) -> None:
    wanted = original(model)
    gm = rewrite(model.to(device), TRITON, shapes=True)
    found = everything(model, gm, device=device)
    for results in (found, wanted):  # a kernel gives zeros where no gradient can come from
        sources = [*inputs(), *model.parameters()]
        results[3] = [torch.zeros_like(x) if g is None else g for x, g in zip(sources, results[3], strict=True)]
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-4, check_device=False)


@on_devices
@given(model=SMOOTH)
@KERNELS
def test_in_float16_errors_are_those_of_the_ops(model: Model, device: str) -> None:
    """Against float64; twice the error of the ops one by one, and some units in the last place of the largest value."""
    exact = original(model, torch.float64)[0]
    errors = []
    for regions in ("triton", ""):
        context = replace(TRITON, policy=Policy.preset("O1"), regions=regions)
        own = copy.deepcopy(model).to(device)
        with torch.no_grad():
            found = pytree.tree_leaves(rewrite(own, context, shapes=True)(*(x.to(device) for x in inputs())))
        errors.append([region_tools.error(a.cpu(), b) for a, b in zip(found, exact, strict=True)])
    for own, other in zip(*errors, strict=True):
        assert own <= 2 * other + 2**-8
