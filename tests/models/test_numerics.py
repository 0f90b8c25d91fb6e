"""Every op that torch tests itself, through the whole pipeline: right dtypes, and no less exact than eager autocast.

Each graph calls an op twice: on FP32 inputs, and on inputs of which all, the first, or all but the first come low out
of a matmul with the identity. What a graph gives is compared with the original in float64.
"""

from __future__ import annotations

import copy
import inspect
import itertools
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule
from torch.testing._internal import common_methods_invocations
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils import _pytree as pytree

from function_module import as_module
from fxprec.capture.symbolic.trace import propagate_shapes, trace_static
from fxprec.passes.graph.annotations import Rule
from fxprec.passes.runner import run_passes
from fxprec.testing import assert_annotations_hold

#: Which of an op's float inputs arrive low in its second call.
ARRIVALS = {"low": slice(None), "first": slice(1), "rest": slice(1, None)}
SETTINGS = list(itertools.product(ARRIVALS, ("O1", "O2"), ("mincut", "autocast")))

#: What networks are made of: these run under all settings, the others under two that change from op to op.
CORE = frozenset(
    """
    add mul div.no_rounding_mode sub pow cat stack where maximum clamp masked_fill sum mean var amax cumsum softmax
    log_softmax exp sqrt matmul mm bmm addmm baddbmm einsum nn.functional.linear nn.functional.conv2d
    nn.functional.conv_transpose2d nn.functional.scaled_dot_product_attention nn.functional.layer_norm
    nn.functional.group_norm nn.functional.batch_norm nn.functional.rms_norm nn.functional.gelu nn.functional.silu
    nn.functional.relu nn.functional.embedding nn.functional.cross_entropy nn.functional.mse_loss nn.functional.dropout
    gather scatter scatter_add index_add index_put chunk split unbind topk sort max.reduction_with_dim view reshape
    transpose
    """.split()
)

SKIPPED = {
    "empty": "uninitialized memory",
    "empty_like": "uninitialized memory",
    "empty_permuted": "uninitialized memory",
    "empty_strided": "uninitialized memory",
    "new_empty": "uninitialized memory",
    "new_empty_strided": "uninitialized memory",
    "sparse.mm.reduce": "sparse inputs cannot be made low by a matmul",
    "sparse.sampled_addmm": "sparse inputs cannot be made low by a matmul",
    "native_batch_norm": "gives statistics in a dtype of their own: nobody traces a model to it",
    "_native_batch_norm_legit": "gives statistics in a dtype of their own: nobody traces a model to it",
    "to_sparse": "a sparse result cannot be cast",
    "item": "numbers out of tensors are not static",
    "nn.functional.triplet_margin_with_distance_loss": "takes a module",
    "_batch_norm_with_update": "gives statistics in a dtype of their own: nobody traces a model to it",
    "linalg.ldl_factor": "pivots jump with the rounding of the input",
    "linalg.ldl_factor_ex": "pivots jump with the rounding of the input",
    **{op.name: "wants CUDA" for op in op_db if op.name.startswith("jiterator")},
}


def name_of(op: Any) -> str:
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name


OPS = {
    name_of(op): op
    for op in op_db
    if torch.float32 in op.dtypes and name_of(op) not in SKIPPED and not op.name.startswith("masked.")
}


#: CPU autocast runs these in FP32; CUDA's, whose lists are ours, in the widest dtype that arrives.
LOWER_ON_CUDA = frozenset({"nn.functional.grid_sample", "grid_sampler_2d", "grid_sampler_3d"})

LOW = torch.bfloat16


class Program(NamedTuple):
    """``function(one, *tensors)``; ``low``: how many of its inputs a matmul with ``one`` gives back, low.

    It sums over two values, of which one is a zero: a product over one value alone is no matter for matrix units.
    """

    function: Callable[..., Any]
    inputs: list[Tensor]
    low: int


class Outcome(NamedTuple):
    results: list[Tensor]
    gradients: list[Tensor | None]


def invoke(op: Any, first: Any, *args: Any, **kwargs: Any) -> Any:
    """Methods of the class are called on the instance: they would not take a traced value."""
    return getattr(first, op.__name__)(*args, **kwargs) if is_method(op) else op(first, *args, **kwargs)


def is_method(op: Any) -> bool:
    """Ask in a frame of its own: in one that names ``isinstance`` a trace tells no C code what a value is."""
    return isinstance(op, types.MethodDescriptorType | types.WrapperDescriptorType)


def program(op: Callable[..., Any], sample: Any, arrival: str) -> Program:
    leaves, spec = pytree.tree_flatten((sample.input, sample.args, sample.kwargs))
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    low = {i: leaves[i].shape for i in [i for i in places if leaves[i].dtype is torch.float32][ARRIVALS[arrival]]}

    def call(tensors: Sequence[Tensor]) -> Any:
        filled = list(leaves)
        for place, tensor in zip(places, tensors, strict=True):
            filled[place] = tensor
        first, args, kwargs = pytree.tree_unflatten(filled, spec)
        return invoke(op, first, *args, **kwargs)

    def function(one: Tensor, *tensors: Tensor) -> Any:
        lowered = [
            torch.matmul(F.pad(tensor.reshape(-1, 1), (0, 1)), one).reshape(low[place]) if place in low else tensor
            for place, tensor in zip(places, tensors, strict=True)
        ]
        return call(tensors), call(lowered)

    names = ["one", *(f"t{place}" for place in places)]
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    function.__signature__ = inspect.Signature([inspect.Parameter(name, kind) for name in names])  # type: ignore[attr-defined]
    return Program(function, [torch.eye(2, 1), *(leaves[place] for place in places)], len(low))


def run(function: Callable[..., Any], inputs: Sequence[Tensor], dtype: torch.dtype = torch.float32) -> Outcome:
    """Results, and the gradients of a fixed random combination of them; FP32 inputs in another dtype."""

    def fresh(tensor: Tensor) -> Tensor:
        copy = tensor.detach().clone()
        return (copy.to(dtype) if copy.dtype is torch.float32 else copy).requires_grad_(tensor.requires_grad)

    arguments = [fresh(tensor) for tensor in inputs]
    torch.default_generator.manual_seed(42)  # torch.manual_seed notes a stack for every device that is not there
    results = [leaf for leaf in pytree.tree_leaves(function(*arguments)) if isinstance(leaf, Tensor)]
    wanted = [argument for argument in arguments if argument.requires_grad]
    generator = torch.Generator().manual_seed(1)
    losses = [
        (result * torch.randn(result.shape, generator=generator, dtype=torch.float64).to(result.dtype)).double().sum()
        for result in results
        if result.requires_grad and result.is_floating_point()
    ]
    gradients = torch.autograd.grad(sum(losses), wanted, allow_unused=True) if losses and wanted else []
    return Outcome(results, list(gradients))


def error(value: Tensor | None, exact: Tensor | None) -> float:
    """The largest difference; infinite where one is missing, or is not finite in another way than the other."""
    if value is None or exact is None:
        return 0.0 if value is exact else torch.inf
    value, exact = value.detach().double(), exact.detach().double()
    same = (value == exact) | (value.isnan() & exact.isnan())
    difference = torch.where(same, 0.0, (value - exact).abs()).nan_to_num(nan=torch.inf)
    return difference.max().item() if difference.numel() else 0.0


def scale(exact: Tensor | None) -> float:
    finite = exact.detach().double().nan_to_num(0.0, 0.0, 0.0) if exact is not None else torch.zeros(0)
    return finite.abs().max().item() if finite.numel() else 0.0


def attempt(function: Callable[..., Any], inputs: Sequence[Tensor], dtype: torch.dtype) -> Outcome | None:
    try:
        return run(function, inputs, dtype)
    except (RuntimeError, ValueError):
        return None


class Peers(NamedTuple):
    """What the original gives in float64 and FP32, under autocast, and in the low dtype throughout, where it can."""

    exact: Outcome
    plain: Outcome
    eager: Outcome | None
    pure: Outcome | None

    @classmethod
    def of(cls, function: Callable[..., Any], inputs: Sequence[Tensor], low: torch.dtype) -> Peers:
        def under_autocast(*arguments: Tensor) -> Any:
            with torch.autocast("cpu", dtype=low):
                return function(*arguments)

        return cls(
            run(function, inputs, torch.float64),
            run(function, inputs),
            attempt(under_autocast, inputs, torch.float32),
            attempt(function, inputs, low),
        )


def check_all(
    tools: Any, name: str, sample: Any, settings: Iterable[tuple[str, str, str]], low: torch.dtype = LOW
) -> None:
    """Under each of the settings; the original runs once for all with the same arrival."""
    by_arrival: dict[str, list[tuple[str, str]]] = {}
    for arrival, *how in settings:
        by_arrival.setdefault(arrival, []).append((how[0], how[1]))
    for arrival, hows in by_arrival.items():
        made = program(OPS[name].op, sample, arrival)
        if made.low:
            peers = Peers.of(made.function, made.inputs, low)
            traced = trace_static(as_module(made.function), tuple(inspect.signature(made.function).parameters), {}).gm
            propagate_shapes(traced, made.inputs)
            for level, placement in hows:
                gm = run_passes(copy.deepcopy(traced), tools.context(level, low=low, placement=placement))
                check(name, gm, made, peers, level, placement, low)


def check(
    name: str, gm: GraphModule, made: Program, before: Peers, level: str, placement: str, low: torch.dtype
) -> None:
    inputs, lowered = made.inputs, made.low
    exact, plain, eager, pure = before
    try:
        ours = run(gm, inputs)
    except NotImplementedError:
        assert placement == "autocast" and pure is None  # CUDA's autocast runs it low too, kernel or not
        return
    assert_annotations_hold(gm, *[tensor.detach().clone() for tensor in inputs])

    assert [(r.dtype, r.shape) for r in ours.results] == [(r.dtype, r.shape) for r in plain.results]
    lowered_ops = sum(node.meta["precision"].rule is Rule.LOW for node in gm.graph.nodes if "precision" in node.meta)
    if level == "O1" and lowered_ops == lowered:
        half = len(plain.results) // 2  # the call on FP32 inputs: nothing of it was lowered
        assert [error(r, p) for r, p in zip(ours.results[:half], plain.results[:half], strict=True)] == [0.0] * half
    peers = [eager] if eager is not None and level == "O1" and name not in LOWER_ON_CUDA else [eager, pure]
    for kind in Outcome._fields:
        values, exacts = getattr(ours, kind), getattr(exact, kind)
        for position, (value, true) in enumerate(zip(values, exacts, strict=True)):
            if value is None or value.is_floating_point():
                rivals = [error(getattr(peer, kind)[position], true) for peer in peers if peer is not None]
                rounding = torch.finfo(low).eps * scale(true)
                reached = max(rivals, default=4 * rounding)
                limit = 2 * reached + rounding + 2 * error(getattr(plain, kind)[position], true) + 1e-6
                assert error(value, true) <= limit, f"{kind} {position}: autocast's error is {reached:.3g}"


def samples(name: str, count: int) -> list[Any]:
    """The first ones, past ``op.sample_inputs``, which looks for the test in the stack and seeds before each: 0.2 s."""
    op = OPS[name]
    made = op.sample_inputs_func(op, "cpu", torch.float32, op.supports_autograd)
    return list(itertools.islice(made, count))


@pytest.fixture(autouse=True)
def _one_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    """op_db's random ops set the seed at every call, which a graph does not."""
    monkeypatch.setattr(common_methods_invocations, "wrapper_set_seed", invoke)


@pytest.mark.parametrize("name", sorted(OPS.keys() - CORE))
def test_op(tools: Any, name: str) -> None:
    position = sorted(OPS).index(name)
    arrival, placements = [*ARRIVALS][position % 3], ("mincut", "autocast")[:: 1 if position % 2 else -1]
    for sample in samples(name, 1):
        check_all(tools, name, sample, [(arrival, *how) for how in zip(("O1", "O2"), placements, strict=True)])


@pytest.mark.parametrize("name", sorted(CORE))
def test_core_op(tools: Any, name: str) -> None:
    first, *others = samples(name, 2)
    check_all(tools, name, first, SETTINGS)
    for sample in others:
        check_all(tools, name, sample, SETTINGS[::3])


@pytest.mark.parametrize("name", ["mul", "softmax", "nn.functional.linear", "nn.functional.layer_norm", "where", "sum"])
def test_float16(tools: Any, name: str) -> None:
    check_all(tools, name, samples(name, 1)[0], SETTINGS[::2], torch.float16)
