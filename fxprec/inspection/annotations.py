"""Check the annotations of rewritten graphs against what really runs: the dtype of every value of every node."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import torch
from torch import nn
from torch.fx import GraphModule, Node

from fxprec.model.module import is_converted
from fxprec.model.warm_up import buffers_kept
from fxprec.passes.dtypes.fake_run import find_disagreement
from fxprec.passes.graph.annotations import UNDECIDED, Precision, Rule, notes
from fxprec.passes.graph.text import dtype_name
from fxprec.programs.program import Executor, Program, lift, without_autocast
from fxprec.tape.attribution import NodeByNode, NodeOf


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
        with torch.random.fork_rng(), mock.patch("fxprec.model.captured.lift", _checking_lift(ran)):
            copy.deepcopy(model)(*args, **kwargs)
    elif isinstance(model, GraphModule) and any(notes(node).state("precision") for node in model.graph.nodes):
        with torch.random.fork_rng(), buffers_kept(model):
            _checking(model, ran).run(*args, *kwargs.values())
    else:
        raise ValueError(f"{type(model).__name__} is neither converted nor a GraphModule that the passes went over")
    if not ran:
        raise ValueError(
            f"the call of {type(model).__name__} ran none of its graphs: see fxprec.report(model).headline"
        )


def _checking(gm: GraphModule, ran: list[str]) -> NodeByNode:
    """Return an interpreter that checks each value of a graph, and adds the names of the nodes that ran."""

    def look(node: NodeOf, run: Callable[[], Any]) -> Any:
        value = run()
        if not isinstance(value, GraphModule):
            ran.append(node.name)
            _check(node.name, node.node, value)
        return value

    return NodeByNode(gm, look)


def _check(name: str, node: Node, value: Any) -> None:
    found = find_disagreement(node, value)
    if found is not None:
        precision = notes(node).precision
        raise AssertionError(
            f"node %{name} ({node.format_node()}): got {dtype_name(found.got)}, expected {dtype_name(found.stated)}"
            + (f" ({precision.rule}: {precision.why})" if precision is not UNDECIDED else "")
        )


def _checking_lift(ran: list[str]) -> Callable[..., Program]:
    def checking(gm: GraphModule, low: torch.dtype, executor: Executor = "eager", device: str = "cpu") -> Program:
        program = lift(gm, low, "eager", device)
        shadow = Precision.arriving(None, low, Rule.KEEP, "the shadow of a weight")
        for node in program.gm.graph.find_nodes(op="placeholder")[: len(program.low)]:
            notes(node).precision = shadow  # the annotation copied over is that of the FP32 weight
        return replace(program, function=without_autocast(_checking(program.gm, ran).run, device))

    return cast("Callable[..., Program]", checking)
