"""Check what a policy says of a custom op against its kernel: in float64, and in the dtype of the rule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from fxprec.passes.graph.annotations import CASTABLE, Rule
from fxprec.passes.graph.text import dtype_name
from fxprec.passes.ops.custom import registered
from fxprec.passes.policy.policy import Policy
from fxprec.passes.torch_internals import FakeTensorMode, tree_leaves, tree_map

#: The error may be that many times what rounding the inputs and the result costs by itself.
_LIMIT: Final = 2.0
#: Rules under which an op is given something else than low inputs; None: what arrives.
_GIVEN: Final[dict[Rule, torch.dtype | None]] = {Rule.FULL: torch.float32, Rule.KEEP: None}


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
    if wanted is None or wanted is torch.float32:
        return
    exact, rounded = _references(what, reference or kernel, given, (args, kwargs), gradients)
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
    generator = torch.Generator().manual_seed(0)  # multiples of 1/4: exact in every dtype
    weights = [torch.randint(-8, 9, r.shape, generator=generator).to(r.device, r.dtype) / 4 for r in results]
    return results, list(torch.autograd.grad(results, inputs, weights, allow_unused=False))


def _is_float(leaf: object) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point()


def _check_fake(what: str, kernel: Callable[..., Any], given: Any, found: Sequence[Tensor]) -> None:
    with FakeTensorMode() as mode:
        args, kwargs = tree_map(lambda leaf: mode.from_tensor(leaf) if isinstance(leaf, Tensor) else leaf, given)
        fakes = [leaf for leaf in tree_leaves(kernel(*args, **kwargs)) if _is_float(leaf)]
    stated, got = [fake.dtype for fake in fakes], [result.dtype for result in found]
    if stated != got:
        raise AssertionError(
            f"{what}: its kernel puts out {dtype_name(tuple(got))}, and its fake implementation says "
            f"{dtype_name(tuple(stated))}: what reads it would be cast wrong"
        )


def _references(what: str, function: Callable[..., Any], given: Any, arguments: Any, gradients: bool) -> Any:
    """Return results in float64: of the arguments, and of those that the kernel got, where only rounding differs."""
    try:
        return tuple(_run(function, _in(torch.float64, each), gradients) for each in (arguments, given))
    except Exception as error:
        raise ValueError(f"{what}: its kernel does not take float64 ({error}): give a reference= that does") from error


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
