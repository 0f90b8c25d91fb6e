"""Assert what really runs: dtypes as the annotations say, casts as counted, custom ops as their rules say."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, cast

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from fxprec.inspection.nodes import NamedNode, NodeByNode
from fxprec.model.conversion import is_converted
from fxprec.model.warm_up import values_kept
from fxprec.passes.dtypes.fake_run import find_disagreement
from fxprec.passes.graph.annotations import CASTABLE, UNDECIDED, Precision, Rule, notes
from fxprec.passes.graph.text import dtype_name
from fxprec.passes.ops.custom import registered
from fxprec.passes.policy.policy import Policy
from fxprec.passes.torch_internals import FakeTensorMode, tree_leaves, tree_map
from fxprec.programs.program import Program, lift, without_autocast
from fxprec.settings import Executor
from fxprec.torch_internals import OpMode, aten_foreach_copy_, aten_to_copy, current_autograd_node, view_base

_VIEWS: Final = frozenset({"TBackward0", "TransposeBackward0", "PermuteBackward0", "ViewBackward0", "AliasBackward0"})
#: The error may be that many times what rounding the inputs and the result costs by itself.
_LIMIT: Final = 2.0
#: Rules under which an op is given something else than low inputs; None: what arrives.
_GIVEN: Final[dict[Rule, torch.dtype | None]] = {Rule.FULL: torch.float32, Rule.KEEP: None}


def assert_annotations_hold(model: nn.Module, *args: Any, **kwargs: Any) -> None:
    """Run rewritten graphs node by node and compare the dtype of every float value with its annotation.

    Args:
        model: a converted module: it is copied, and every graph that a call of the copy runs is checked as it runs, on
            shadows; or a rewritten GraphModule, whose buffers and the random state are as before afterwards.
        args, kwargs: what to call it with.

    Raises:
        AssertionError: a value has another dtype than the annotation: names node, got and expected.
        ValueError: the GraphModule holds no annotations, or the call ran no graph at all.
    """
    from unittest import mock  # costs more to import than the rest of fxprec.testing

    ran: list[str] = []
    if is_converted(model):
        # The copy captures anew: only then does every graph of the call go through the patched ``lift``.
        with torch.random.fork_rng(), mock.patch("fxprec.programs.packed_weights.lift", _checking_lift(ran)):
            copy.deepcopy(model)(*args, **kwargs)
    elif isinstance(model, GraphModule) and any(notes(node).state("precision") for node in model.graph.nodes):
        with torch.random.fork_rng(), values_kept(model.buffers()):
            _checking(model, ran).run(*args, *kwargs.values())
    else:
        raise ValueError(f"{type(model).__name__} is neither converted nor a GraphModule that the passes went over")
    if not ran:
        raise ValueError(
            f"the call of {type(model).__name__} ran none of its graphs: see fxprec.report(model).headline"
        )


def _checking(gm: GraphModule, ran: list[str]) -> NodeByNode:
    """Return an interpreter that checks each value of a graph, and adds the names of the nodes that ran."""

    def look(node: NamedNode, run: Callable[[], Any]) -> Any:
        value = run()
        if not isinstance(value, GraphModule):
            ran.append(node.name)
            if (found := find_disagreement(node.node, value)) is not None:
                precision = notes(node.node).precision
                raise AssertionError(
                    f"node %{node.name} ({node.node.format_node()}): got {dtype_name(found.got)}, expected "
                    f"{dtype_name(found.stated)}"
                    + (f" ({precision.rule}: {precision.why})" if precision is not UNDECIDED else "")
                )
        return value

    return NodeByNode(gm, look)


def _checking_lift(ran: list[str]) -> Callable[..., Program]:
    def checking(gm: GraphModule, low: torch.dtype, executor: Executor = "eager", device: str = "cpu") -> Program:
        program = lift(gm, low, "eager", device)
        shadow = Precision.arriving(None, low, Rule.KEEP, "the shadow of a weight")
        for node in program.gm.graph.find_nodes(op="placeholder")[: len(program.low)]:
            notes(node).precision = shadow  # the annotation copied over is that of the FP32 weight
        return replace(program, function=without_autocast(_checking(program.gm, ran).run, device))

    return cast("Callable[..., Program]", checking)


@dataclass
class CastCount:
    """Casts from one float dtype to another, executed since ``count_casts`` was entered.

    Attributes:
        weights: of parameters and views of them.
        weight_gradients: of gradients on their way to a parameter, in the backward.
        activations: of anything else, in a forward (recomputed ones too).
        gradients: of other gradients.
        refreshes: multi-tensor copies of weights to their shadows, each one call however many weights; not in
            ``total``.
    """

    weights: int = 0
    weight_gradients: int = 0
    activations: int = 0
    gradients: int = 0
    refreshes: int = 0

    @property
    def total(self) -> int:
        return self.weights + self.weight_gradients + self.activations + self.gradients


@contextlib.contextmanager
def count_casts() -> Iterator[CastCount]:
    """Count within the block: ``with count_casts() as casts: model(x).sum().backward()``, then ``casts.total``.

    Counted is ``aten._to_copy`` between float dtypes; not what a kernel converts inside, and not a ``copy_`` to a
    tensor of another dtype, which is a write. Works for original, autocast and converted models alike.
    """
    with _Counting() as mode:
        yield mode.count


class _Counting(OpMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = CastCount()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is aten_to_copy:
            source, target = args[0], kwargs.get("dtype") or args[0].dtype
            if target != source.dtype and target.is_floating_point and source.is_floating_point():
                self._count_cast(source)
        elif func is aten_foreach_copy_:
            self.count.refreshes += any(a.dtype != b.dtype for a, b in zip(args[0], args[1], strict=True))
        return func(*args, **kwargs)

    def _count_cast(self, source: Tensor) -> None:
        node = current_autograd_node()
        # A checkpoint recomputes its forward while a node of the backward runs, but with gradients enabled.
        if node is not None and (node.name().startswith("ToCopyBackward") or not torch.is_grad_enabled()):
            of_weight = _leads_to_parameter(node)
            self.count.weight_gradients += of_weight
            self.count.gradients += not of_weight
        # Autocast casts a transposed or sliced weight as often as the weight itself.
        elif isinstance(source, nn.Parameter) or isinstance(view_base(source), nn.Parameter):
            self.count.weights += 1
        else:
            self.count.activations += 1


def _leads_to_parameter(node: Any) -> bool:
    """Return whether this backward node gives the gradient of a parameter, or of a view of one."""
    while len(node.next_functions) == 1 and node.next_functions[0][0] is not None:
        node = node.next_functions[0][0]
        if node.name().endswith("AccumulateGrad"):
            return isinstance(node.variable, nn.Parameter)
        if node.name() not in _VIEWS:
            return False
    return False


def assert_rule_holds(
    policy: Policy,
    op: str,
    *args: Any,
    low: torch.dtype = torch.bfloat16,
    reference: Callable[..., Any] | None = None,
    gradients: bool = True,
    **kwargs: Any,
) -> None:
    """Assert that the kernel of a custom op bears the row that a policy has of it.

    The kernel runs as a converted model would call it: LOW, FOLLOW and PROMOTE on inputs in ``low``, FULL on FP32
    ones, KEEP on what is given. It must take them and give what its fake implementation says. In ``low`` it may be off
    from float64 by at most twice what rounding the inputs and the results alone costs: forward, and for each input
    that requires grad. A kernel that sums in ``low`` fails there, one that overflows too. (FULL and KEEP change nothing
    of what the model computed before.)

    Args:
        policy: with a row of the op (``Policy.with_rule``), or any, for what ``register_autocast`` says.
        op: its name, ``"namespace::name"``.
        *args, **kwargs: of one call, floats in float32, in sizes that are usual for the op.
        low: float16 or bfloat16.
        reference: computes the same in float64; None: the kernel itself does.
        gradients: False for an op that is never differentiated.

    Raises:
        AssertionError: the rule does not hold; says what was found.
        ValueError: torch has no such op, the policy says nothing of it, or there is nothing to compare with.
    """
    kernel = registered(op)
    if kernel is None:
        raise ValueError(f"torch has no op {op!r}: import what registers it first")
    rule, why = policy.row(op, None)
    if rule is Rule.KEEP and not any(row.op == op for row in policy.rules):
        raise ValueError(f"the policy says nothing of {op}: add a row with Policy.with_rule({op!r}, rule, why)")
    what = f"{op} ({rule if isinstance(rule, Rule) else dtype_name(rule)}: {why})"
    wanted = rule if isinstance(rule, torch.dtype) else _GIVEN.get(rule, low)
    given = _in(wanted, (args, kwargs))
    try:
        found = _run(kernel, given, gradients)
    except Exception as error:
        raise AssertionError(
            f"{what}: its kernel does not take {'its own dtypes' if wanted is None else dtype_name(wanted)}: {error}"
        ) from error
    # The passes decide by the fake implementation: one that lies would misplace casts silently.
    _check_fake(what, kernel, given, found[0])
    # An op that stays in its dtypes loses nothing that rounding could explain.
    if wanted is None or wanted is torch.float32:
        return
    # Of the arguments, and of those that the kernel got, where only rounding differs.
    pairs = ((args, kwargs), given)
    try:
        exact, rounded = (_run(reference or kernel, _in(torch.float64, each), gradients) for each in pairs)
    except Exception as error:
        raise ValueError(f"{what}: its kernel does not take float64 ({error}): give a reference= that does") from error
    for name, got, true, ideal in zip(("result", "gradient"), found, exact, rounded, strict=True):
        for number, (ours, theirs, best) in enumerate(zip(got, true, ideal, strict=True)):
            _check_error(f"{what}: in {dtype_name(wanted)} {name} {number}", ours, theirs, best)


def _in(dtype: torch.dtype | None, arguments: Any) -> Any:
    """Return copies of the arguments, floats in this dtype; None: as they are."""

    def one(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        wanted = leaf.dtype if dtype is None or leaf.dtype not in CASTABLE else dtype
        return leaf.detach().to(wanted, copy=True).requires_grad_(leaf.requires_grad)

    return tree_map(one, arguments)


def _run(function: Callable[..., Any], given: Any, gradients: bool) -> tuple[list[Tensor], list[Tensor]]:
    """Return float results, and gradients of their sum times fixed numbers for the inputs that require any.

    Raises:
        RuntimeError: the result does not depend on them as far as autograd knows.
    """
    args, kwargs = given
    results = [leaf for leaf in tree_leaves(function(*args, **kwargs)) if _is_float(leaf)]
    inputs = [leaf for leaf in tree_leaves(given) if isinstance(leaf, Tensor) and leaf.requires_grad]
    if not gradients or not inputs:
        return results, []
    # Fixed numbers as cotangents: of a plain sum, errors of both signs would cancel.
    generator = torch.Generator().manual_seed(0)  # multiples of 1/4: exact in every dtype
    weights = [torch.randint(-8, 9, r.shape, generator=generator).to(r.device, r.dtype) / 4 for r in results]
    return results, list(torch.autograd.grad(results, inputs, weights, allow_unused=False))


def _is_float(leaf: object) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point()


def _check_fake(what: str, kernel: Callable[..., Any], given: Any, found: Sequence[Tensor]) -> None:
    # A new mode, which nothing else was traced under, knows no sizes of other calls.
    with FakeTensorMode() as mode:
        args, kwargs = tree_map(lambda leaf: mode.from_tensor(leaf) if isinstance(leaf, Tensor) else leaf, given)
        fakes = [leaf for leaf in tree_leaves(kernel(*args, **kwargs)) if _is_float(leaf)]
    stated, got = [fake.dtype for fake in fakes], [result.dtype for result in found]
    if stated != got:
        raise AssertionError(
            f"{what}: its kernel puts out {dtype_name(tuple(got))}, and its fake implementation says "
            f"{dtype_name(tuple(stated))}: what reads it would be cast wrong"
        )


def _check_error(what: str, ours: Tensor, exact: Tensor, rounded: Tensor) -> None:
    """Raise if a result is further off than rounding explains; ``rounded`` is float64 on the rounded inputs."""
    # No kernel can do better than exact arithmetic on rounded inputs, rounded once: errors are judged against that.
    best = rounded.to(ours.dtype).double()
    size = exact.abs().max().item() if exact.numel() else 0.0
    allowed = _LIMIT * max((best - exact).abs().max().item(), torch.finfo(ours.dtype).eps * size)
    error = (ours.double() - exact).abs().max().item()
    if not error <= allowed:  # nan too
        raise AssertionError(
            f"{what} is off from float64 by {error:.3g}, more than twice what rounding alone costs ({allowed:.3g}): "
            "it computes too low inside. Give the op the rule 'full', or widen its sums"
        )
