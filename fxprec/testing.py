"""Assertions for unit tests of a precision: what computes in which dtype, how the graph reads, which casts run.

::

    fxprec.testing.assert_precision(model, "*.norm*", torch.float32)
    fxprec.testing.assert_graph(model, "%x: float32 = placeholder ...")
    with fxprec.testing.count_casts() as casts:
        model(x).sum().backward()
    assert casts.weights == 0
    fxprec.testing.assert_annotations_hold(model, x)
    fxprec.testing.assert_rule_holds(policy, "mylib::gate", torch.randn(4, 64), torch.randn(64))
    with fxprec.testing.check_shadows(model), torch.no_grad():
        model(x)
"""

from __future__ import annotations

import contextlib
import difflib
import textwrap
from collections.abc import Iterator
from typing import Literal

import torch
from torch import nn
from torch.fx import GraphModule

from fxprec.inspection.checks import CastCount, assert_annotations_hold, assert_rule_holds, count_casts
from fxprec.inspection.nodes import NamedNode, is_inserted, moves_data, op_name, places, select, source_line
from fxprec.model.conversion import conversion_of
from fxprec.model.graphs import rewritten_graphs
from fxprec.passes.graph import text
from fxprec.passes.graph.annotations import Precision, notes
from fxprec.passes.graph.text import dtype_name

__all__ = [
    "CastCount",
    "assert_annotations_hold",
    "assert_graph",
    "assert_precision",
    "assert_rule_holds",
    "check_shadows",
    "count_casts",
    "format_graph",
]


def assert_precision(
    model: nn.Module,
    pattern: str,
    dtype: torch.dtype,
    *,
    what: Literal["compute", "output", "reads"] = "compute",
) -> None:
    """Assert the dtype of every float node that a pattern names, in all graphs captured so far.

    Args:
        model: a converted module, or a GraphModule that ``fxprec.graph_module`` returned.
        pattern: a module path or glob (all below it too), a node name or glob, or "op:softmax". Of a module, views,
            copies and casts are left out: they compute nothing.
        dtype: the dtype expected.
        what: "compute": the arithmetic's; "output": the result's; "reads": what the data inputs arrive in.

    Raises:
        AssertionError: some are of another dtype: names each, and why it is.
        ValueError: the pattern names nothing (with the nearest names), or nothing that computes with floats.
        NotCapturedError: the model is captured at its first call, which did not happen yet.
    """
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype must be a torch.dtype such as torch.float32, not {dtype!r}")
    if what not in ("compute", "output", "reads"):
        raise ValueError(f"what={what!r} is none of 'compute', 'output', 'reads'")
    # Of all graphs, so that an assertion does not pass because its node is in another one.
    found = [place for number, gm in enumerate(rewritten_graphs(model)) for place in places(number, gm)]
    chosen = [
        (place, precision)
        for place in select(found, pattern, [name for name, _ in model.named_modules() if name])
        if (precision := _computing(place, pattern)) is not None
    ]
    if not chosen:
        raise ValueError(f"{pattern!r} names only nodes that compute nothing with floats")
    # Every node that is wrong is listed, with its reason: one mistake in a policy shows in many.
    wrong = [(place, precision) for place, precision in chosen if getattr(precision, what) != dtype]
    if wrong:
        verb = {"compute": "computes in", "output": "puts out", "reads": "reads"}[what]
        lines = [
            f"  %{place.name} = {op_name(place.node)} {verb} {dtype_name(getattr(precision, what))}: "
            f"{precision.rule}, {precision.why}" + (f" ({line})" if (line := source_line(place.node)) else "")
            for place, precision in wrong
        ]
        raise AssertionError(
            f"{len(wrong)} of {len(chosen)} nodes named by {pattern!r}: expected {what} {dtype_name(dtype)}\n"
            + "\n".join(lines)
        )


def _computing(place: NamedNode, pattern: str) -> Precision | None:
    node = place.node
    precision = notes(node).precision
    if precision.compute is None or is_inserted(node):
        return None
    if node.op not in ("call_function", "call_method"):
        return None
    # A view has a dtype, and computes nothing: it counts only where it is meant by name.
    named = pattern.startswith(("op:", "node:")) or pattern == place.name
    return precision if named or not moves_data(op_name(node)) else None


@contextlib.contextmanager
def check_shadows(model: nn.Module) -> Iterator[None]:
    """Compare, in each forward within the block, the shadows that would be read as they are with their weights.

    Shadows are the low copies of weights. It finds writes that nothing shows, since they are to a part of a weight only
    and no version counts them (``weight.data[3] = 0``): under ``no_grad`` any; in training forwards, which copy weights
    anyway, those after a step of ``fxprec.optim``, which wrote the shadows.

    Costs a cast and a comparison of each weight a forward.

    Raises:
        StaleShadowError: in a forward; names the weights. ``fxprec.refresh(model)`` is missing after the write.
    """
    store = conversion_of(model).store
    before, store.debug = store.debug, True
    try:
        yield
    finally:
        store.debug = before


def format_graph(model: nn.Module) -> str:
    """Return the graphs of ``model``, a converted module or any GraphModule, as text: a line a node with its dtype.

    >>> %linear: bfloat16 = linear(%x_low, %weight_low, %bias_low)

    Several graphs, and the bodies of higher-order ops, follow each other under a line with their name.
    """
    graphs = (model,) if isinstance(model, GraphModule) else rewritten_graphs(model)
    if len(graphs) == 1:
        return _with_bodies(graphs[0])
    return "\n\n".join(f"# graph {number}\n{_with_bodies(gm)}" for number, gm in enumerate(graphs, 1))


def _with_bodies(gm: GraphModule) -> str:
    bodies = {
        place.name.rpartition(".")[0]: place.node.graph.owning_module for place in places(0, gm) if "." in place.name
    }
    texts = [f"# {name}\n{text.format_graph(body)}" for name, body in bodies.items() if body is not None]
    return "\n\n".join([text.format_graph(gm), *texts])


def assert_graph(model: nn.Module, expected: str) -> None:
    """Assert that ``format_graph(model)`` is the expected text.

    Args:
        model: a converted module, or any GraphModule.
        expected: its text, whatever its common indentation.

    Raises:
        AssertionError: with the difference, line by line.
    """
    # Indentation is that of the test's source.
    got = format_graph(model).strip().splitlines()
    wanted = textwrap.dedent(expected).strip().splitlines()
    if got != wanted:
        diff = difflib.unified_diff(wanted, got, "expected", "got", lineterm="", n=max(len(got), len(wanted)))
        raise AssertionError("the graph reads otherwise:\n" + "\n".join(diff))
