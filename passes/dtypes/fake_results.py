"""Read a node's fake value (``meta["val"]``): elements, and the dtype of a result that the op table cannot give.

Fake values are often captured under autocast, so their dtypes may be the low one. Where autocast changed the inputs of
a node, the node is run once more on fake tensors of the original dtypes, with autocast off.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from fxprec.kernels.launch.operands import LOW_DTYPES
from fxprec.kernels.torch_internals import FakeTensor
from fxprec.passes.graph.annotations import NON_TENSOR, UNKNOWN, DTypeInfo, leaves, nested, notes
from fxprec.passes.torch_internals import FakeTensorMode, no_autocast


def fake_value(node: Node) -> Any:
    """Return a node's fake value; dynamo's own where nobody took it over, as in the bodies of checkpointed regions."""
    return node.meta.get("val", node.meta.get("example_value"))


def numel_of(value: Any) -> Any:
    """Elements of a tensor, a tuple of them for several; None where nobody knows. Symbolic sizes give their hint."""
    if isinstance(value, tuple | list):
        return tuple(map(numel_of, value))
    return hint(value.numel()) if isinstance(value, torch.Tensor) else None


def hint(size: Any) -> int | None:
    """Return a size; of a symbolic one what it was when it was captured; None where nobody knows."""
    if isinstance(size, int):
        return size
    node = getattr(size, "node", None)
    seen = getattr(node, "hint", None) if getattr(node, "has_hint", lambda: False)() else None
    return int(seen) if isinstance(seen, int) else None


def value_dtype(value: Any) -> DTypeInfo:
    """dtypes of a value, nested as it is."""
    return nested(value, lambda leaf: leaf.dtype if isinstance(leaf, torch.Tensor) else NON_TENSOR)


def fake_result(node: Node, low: torch.dtype) -> DTypeInfo:
    """dtype of a node's result in the original program, from fake tensors; UNKNOWN where there are none to ask."""
    value = node.meta.get("val")
    if value is None:
        return UNKNOWN
    captured = value_dtype(value)
    if not _captured_otherwise(node) and not _lowered_itself(node, captured):
        return captured
    # An input of unknown dtype that was low under autocast may be FP32 in the original: so may a low result.
    if any(
        notes(source).dtype is UNKNOWN and value_dtype(source.meta.get("val")) is low for source in node.all_input_nodes
    ):
        return _doubtful(captured, low)
    try:
        return value_dtype(_rerun(node))
    except Exception:  # a custom op that has no fake, or refuses these dtypes: its captured value is all there is
        return _doubtful(captured, low)


def _captured_otherwise(node: Node) -> bool:
    """Return whether autocast had given some input another dtype than the original program has."""
    return any(
        source.meta.get("val") is not None and value_dtype(source.meta["val"]) != notes(source).dtype
        for source in node.all_input_nodes
        if notes(source).dtype is not NON_TENSOR
    )


def _lowered_itself(node: Node, captured: DTypeInfo) -> bool:
    """Return whether the result has a low dtype that no input has: autocast is registered for the op, or used in it."""
    inputs = {info for source in node.all_input_nodes for info in leaves(notes(source).dtype)}
    return any(info in LOW_DTYPES and info not in inputs for info in leaves(captured))


def _doubtful(captured: DTypeInfo, low: torch.dtype) -> DTypeInfo:
    """Return the captured dtypes, UNKNOWN in place of the low one, which autocast may have made."""
    return nested(captured, lambda info: UNKNOWN if info is low else info)


def _rerun(node: Node) -> Any:
    values = (source.meta.get("val") for source in node.all_input_nodes)
    with quietly(next(value.fake_mode for value in values if isinstance(value, FakeTensor))):
        return call(node, _original)


def call(node: Node, value_of: Callable[[Node], Any]) -> Any:
    """Run the function or method that a node calls, on a value for each node among its arguments."""
    args, kwargs = map_arg((node.args, node.kwargs), value_of)
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    assert callable(node.target)
    return node.target(*args, **kwargs)


def _original(source: Node) -> Any:
    value, dtype = source.meta.get("val"), notes(source).dtype
    if isinstance(value, torch.Tensor) and isinstance(dtype, torch.dtype):
        return value if value.dtype is dtype else value.to(dtype)
    if isinstance(value, tuple | list) and isinstance(dtype, tuple):
        same = value_dtype(value) == dtype
        return value if same else type(value)(v.to(d) for v, d in zip(value, dtype, strict=True))
    if value is None:
        raise ValueError(f"{source.name} has no fake value")
    return value


@contextlib.contextmanager
def quietly(mode: FakeTensorMode) -> Iterator[None]:
    """Fake tensors, no autocast, no gradients, and no trace of the question in the guards of the capture."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(no_autocast())
        stack.enter_context(torch.no_grad())
        shape_env = mode.shape_env
        if shape_env is not None:
            stack.enter_context(shape_env.suppress_guards())
            stack.enter_context(shape_env.ignore_fresh_unbacked_symbols())
        stack.enter_context(mode)
        yield
