"""runner: the passes in their order; after each lint and invariants; what it logs, collects and recompiles."""

from __future__ import annotations

import copy
import logging
import re

import pytest
import torch
import torch._higher_order_ops.wrap
import torch.nn.functional as F
from torch import nn
from torch.fx import Graph, GraphModule, symbolic_trace

import fxprec
from fxprec.passes.context import PassResult
from fxprec.passes.decide import decide as original
from fxprec.passes.fold_casts import fold_casts
from fxprec.passes.graph.annotations import graph_notes
from fxprec.passes.insert_casts import insert_casts
from fxprec.passes.policy.policy import Policy
from fxprec.passes.runner import PIPELINE, run_passes
from log_records import log_records

INPUTS = torch.randn(2, 4), torch.randn(4, 4)


def f(x, w):
    return torch.exp(F.linear(x, w))


@pytest.fixture(params=["graph", "body"])
def graphs(request, tools):
    """A graph to run, and the one where things happen: itself, or a body that it calls."""
    if request.param == "graph":
        gm = tools.traced(f, *INPUTS)
        return gm, gm
    graph = Graph()
    x, w = (graph.placeholder(name) for name in "xw")
    x.meta["dtype"] = w.meta["dtype"] = torch.float32
    graph.output(graph.call_function(torch.ops.higher_order.wrap, (graph.get_attr("body"), x, w)))
    gm = GraphModule({"body": symbolic_trace(f)}, graph)
    return gm, gm.body


def through(name):
    """The pipeline up to and with the pass of this name."""
    return PIPELINE[: [step.__name__ for step in PIPELINE].index(name) + 1]


def never(gm, context):
    raise AssertionError("a pass ran after a broken one")


def test_the_order():
    assert [step.__name__ for step in PIPELINE] == (
        "resolve_autocast_regions canonicalize recognize_rotary take_logits propagate merge_results "
        "decide insert_casts fold_casts keep_returned share_returned limit_readers "
        "accumulate_wide lay_out_images make_functional "
        "call_kernels fuse move_wide verify"
    ).split()


def test_every_pass_gets_what_the_one_before_gave(tools):
    ctx, first, second = tools.context(), symbolic_trace(f), symbolic_trace(f)
    seen = []

    def swap(gm, context):
        seen.append((gm, context))
        return PassResult(second, True)

    def look(gm, context):
        seen.append((gm, context))
        return PassResult(gm, False)

    assert run_passes(first, ctx, [swap, look]) is second
    for (gm, context), expected in zip(seen, (first, second), strict=True):
        assert gm is expected and context is ctx


def test_the_graph_is_rewritten_in_place_and_parameters_are_not(tools):
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    gm = tools.traced(model, INPUTS[0])
    before = {name: (value.data_ptr(), value.clone()) for name, value in gm.state_dict().items()}
    assert run_passes(gm, tools.context("O3")) is gm
    for name, value in gm.state_dict().items():
        pointer, old = before[name]
        assert value.data_ptr() == pointer and value.dtype is old.dtype and torch.equal(value, old)


def test_what_runs_is_the_new_graph(tools, graphs):
    gm, _ = graphs
    assert torch.equal(gm(*INPUTS), f(*INPUTS))
    run_passes(gm, tools.context())
    x, w = (value.bfloat16() for value in INPUTS)
    assert torch.equal(gm(*INPUTS), F.linear(x, w).float().exp())


def test_a_graph_that_lint_refuses_stops_at_once(tools, graphs):
    gm, where = graphs

    def reorder(gm, context):
        first, *_, last = where.graph.nodes
        first.prepend(last.all_input_nodes[0])  # used before it is defined
        return PassResult(gm, True)

    with pytest.raises(RuntimeError, match="was used before it has been defined"):
        run_passes(gm, tools.context(), [reorder, never])


def test_a_pass_that_breaks_an_invariant_is_named(tools, graphs):
    gm, where = graphs

    def careless(gm, context):
        node = next(node for node in where.graph.nodes if node.name == "linear")
        node.replace_input_with(node.args[0], node.args[0].args[0])
        return PassResult(gm, True)

    told = 'careless broke "every float edge has the dtype its reader wants": node linear, argument x: '
    with pytest.raises(fxprec.InvariantError, match="^" + re.escape(told) + "got float32, expected bfloat16"):
        run_passes(gm, tools.context(), [*through("insert_casts"), careless, never])


def test_a_pass_that_changes_without_saying_so_is_found_out_at_the_end(tools):
    def careless(gm, context):
        node = next(node for node in gm.graph.nodes if node.name == "linear")
        node.replace_input_with(node.args[0], node.args[0].args[0])
        return PassResult(gm, False)

    def reorder(gm, context):
        first, *_, last = gm.graph.nodes
        first.prepend(last.all_input_nodes[0])
        return PassResult(gm, False)

    with pytest.raises(fxprec.InvariantError, match=r'^verify broke "every float edge .*node linear, argument x'):
        run_passes(tools.traced(f, *INPUTS), tools.context(), [*through("insert_casts"), careless, PIPELINE[-1]])
    with pytest.raises(fxprec.InvariantError, match=r'^verify broke "a node reads what stands before it .*node exp'):
        run_passes(tools.traced(f, *INPUTS), tools.context(), [reorder, PIPELINE[-1]])


def test_annotations_are_checked_on_the_result_of_the_pass_that_makes_them(tools):
    def decide(gm, context):  # which changes no graph, and forgets a node
        original(gm, context)
        del next(iter(gm.graph.nodes)).meta["precision"]
        return PassResult(gm, False)

    with pytest.raises(fxprec.InvariantError, match=r"^decide broke .*node x: got no precision"):
        run_passes(tools.traced(f, *INPUTS), tools.context(), [*through("merge_results"), decide, never])


def test_a_graph_that_did_not_change_is_not_gone_over_again(tools, monkeypatch):
    linted = []
    lint = Graph.lint
    monkeypatch.setattr(Graph, "lint", lambda graph: linted.append(len(graph.nodes)) or lint(graph))
    run_passes(tools.traced(f, *INPUTS), tools.context())
    assert linted == [8]  # after insert_casts


def test_for_users_the_result_alone_is_checked(tools, monkeypatch):
    def careless(gm, context):
        node = next(node for node in gm.graph.nodes if node.name == "linear")
        node.replace_input_with(node.args[0], node.args[0].args[0])
        return PassResult(gm, True)

    monkeypatch.delenv("FXPREC_VERIFY_EACH")
    linted = []
    lint = Graph.lint
    monkeypatch.setattr(Graph, "lint", lambda graph: linted.append(len(graph.nodes)) or lint(graph))
    run_passes(tools.traced(f, *INPUTS), tools.context())
    assert linted == []
    with pytest.raises(fxprec.InvariantError, match=r'^verify broke "every float edge .*node linear, argument x'):
        passes = [*through("insert_casts"), careless, *PIPELINE[PIPELINE.index(fold_casts) :]]
        run_passes(tools.traced(f, *INPUTS), tools.context(), passes)


def test_an_invariant_counts_from_the_pass_on_that_sets_it_up(tools):
    def forgetful(gm, context):
        for node in gm.graph.nodes:
            node.meta.pop("dtype", None)
        return PassResult(gm, True)

    run_passes(symbolic_trace(f), tools.context(), [forgetful])
    with pytest.raises(fxprec.InvariantError, match=r"^forgetful broke .*node x: got no dtype"):
        run_passes(symbolic_trace(f), tools.context(), [*through("propagate"), forgetful])

    def propagate(gm, context):  # counts on its own result too
        return forgetful(gm, context)

    with pytest.raises(fxprec.InvariantError, match=r"^propagate broke"):
        run_passes(symbolic_trace(f), tools.context(), [propagate])


def test_a_line_is_logged_for_every_pass(tools):
    with log_records("fxprec.passes.runner") as records:
        run_passes(tools.traced(f, *INPUTS), tools.context())
    lines = [re.sub(r"\d+\.\d ms$", "T", record.getMessage()) for record in records]
    nodes = dict.fromkeys((step.__name__ for step in through("decide")), 5)
    assert lines == [
        f"{step.__name__}: {'changed' if step is insert_casts else 'unchanged'}, {nodes.get(step.__name__, 8)} nodes, T"
        for step in PIPELINE
    ]
    assert {record.levelno for record in records} == {logging.DEBUG}


def test_what_passes_decline_is_collected(tools):
    def first(gm, context):
        return PassResult(gm, False, ("a: one reason", "b: another"))

    def second(gm, context):
        return PassResult(gm, False, ("a: a third",))

    gm = symbolic_trace(f)
    run_passes(gm, tools.context(), [first, second])
    assert graph_notes(gm).declined == ["first: a: one reason", "first: b: another", "second: a: a third"]
    run_passes(gm, tools.context())
    assert graph_notes(gm).declined == []  # of this run only


def test_the_reason_of_a_real_pass(tools):
    def write(x):
        return x.view(-1).add_(1.0)

    gm = tools.traced(write, INPUTS[0])
    run_passes(gm, tools.context(policy=Policy.preset("O1").override(ops={"view": torch.float16})))
    assert graph_notes(gm).declined == ["decide: view: wants float16, shares memory that is float32"]
    ours, theirs = copy.deepcopy((INPUTS[0], INPUTS[0]))
    assert torch.equal(gm(ours), write(theirs)) and torch.equal(ours, theirs)
