"""Functions that graphs call about what a method takes and gives; ``passes/leaves`` says what a trace makes of them."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor, dtype
from torch.fx.node import has_side_effect

from fxprec.capture.call_key import same_constant
from fxprec.capture.pytrees import has_low_input, parts_of, restore_dtypes
from fxprec.errors import OtherCallError
from fxprec.kernels.launch.graph_call import graph_call
from fxprec.torch_internals import tree_unflatten, treespec_loads

#: The default of an argument that may, or must, be left out of a call.
LEFT_OUT: Final = ...
#: What ``check_arguments`` does not look at.
ANYTHING: Final = None


@graph_call
def restored(output: Any, low: dtype, *inputs: Any) -> Any:
    """Return ``output`` with every low tensor as FP32, unless an input is low, as the model does with results."""
    return output if has_low_input(inputs, low) else restore_dtypes(output, low)


@graph_call
def in_container(leaves: Sequence[Any], spec: str, modules: Sequence[str] = ()) -> Any:
    """Make of these leaves what ``torch.utils._pytree`` does: a ``ModelOutput``, say.

    Args:
        leaves: its tensors and numbers.
        spec: as ``treespec_dumps`` writes it.
        modules: where its classes are defined, and registered as containers.
    """
    for module in modules:
        importlib.import_module(module)
    return tree_unflatten([*leaves], treespec_loads(spec))


@graph_call
def number_tensor(value: float, dtype: dtype) -> Tensor:
    """Return a number as dynamo has it where it may change: a 0-dim tensor."""
    return torch.tensor(value, dtype=dtype)


@graph_call
def check_arguments(given: dict[str, Any], expected: dict[str, Any]) -> None:
    """Refuse calls unlike the one that a graph was captured for: what was no tensor is built into it.

    Args:
        given: the arguments.
        expected: of each what it must be: ``"Tensor"``, ``"float32[4, *]"`` (and ``"=1"`` behind it: of those with one
            number each must be the very same tensor), ``(3,)`` for the constant 3, ``()`` for one that must be left
            out, a list of such, a dict of such (for an object: by attribute), or None: anything.

    Raises:
        OtherCallError: one is another.
    """
    same: dict[str, tuple[str, Tensor]] = {}
    for name, value in given.items():
        _check(value, expected[name], name, same)


has_side_effect(check_arguments)


def _check(value: Any, expected: Any, where: str, same: dict[str, tuple[str, Tensor]]) -> None:
    if expected is ANYTHING:
        return
    if isinstance(expected, str):
        kind, _, group = expected.partition("=")
        _check_tensor(value, kind, group, where, same)
    elif isinstance(expected, tuple):
        if not (same_constant(value, expected[0]) if expected else value is LEFT_OUT):
            raise _other(where, f"{expected[0]!r}" if expected else "nothing", value)
    elif isinstance(expected, list):
        if not isinstance(value, tuple | list) or len(value) != len(expected):
            raise _other(where, f"a sequence of {len(expected)}", value)
        for number, (part, wanted) in enumerate(zip(value, expected, strict=True)):
            _check(part, wanted, f"{where}[{number}]", same)
    else:
        held = held_by(value)
        if held.keys() != expected.keys():
            raise _other(where, f"an object with {[*expected]}", value)
        for key, wanted in expected.items():
            _check(held[key], wanted, f"{where}[{key!r}]", same)


def held_by(value: Any) -> dict[str | int, Any]:
    """Return what a dict or an object holds, by key or attribute."""
    return {key: part for parts in parts_of(value) or () for key, part in parts.items() if type(key) in (str, int)}


def _check_tensor(value: Any, kind: str, group: str, where: str, same: dict[str, tuple[str, Tensor]]) -> None:
    if not isinstance(value, Tensor):
        raise _other(where, "a tensor", value)
    name, _, sizes = kind.rstrip("]").partition("[")
    if name != "Tensor":
        wanted = sizes.split(", ") if sizes else []
        if value.dim() != len(wanted) or f"{value.dtype}" != f"torch.{name}":
            raise _other(where, kind, value)
        compared = zip(value.shape, wanted, strict=True)
        if torch.jit.is_tracing():  # type: ignore[attr-defined]  # it warns of comparing sizes, and keeps those it sees
            compared = ()
        if any(fixed != "*" and size != int(fixed) for size, fixed in compared):
            raise _other(where, kind, value)
    if group:
        other, tensor = same.setdefault(group, (where, value))
        if tensor is not value:
            raise _other(where, f"the very tensor that {other} is", value)


def _other(where: str, captured: str, value: Any) -> OtherCallError:
    if isinstance(value, Tensor):
        got = f"{str(value.dtype).removeprefix('torch.')}{[*value.shape]}"
    else:
        got = "nothing" if value is LEFT_OUT else repr(value) if isinstance(value, int | float | str) else ""
        got = got or f"{value}"[:60]
    return OtherCallError(
        f"{where}: this graph was captured with {captured}, which is built into it, and is called with {got}. "
        "Call the model so, and ask for its graph again"
    )
