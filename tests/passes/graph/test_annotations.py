"""Annotations: every field has one writer, and an answer where nobody wrote it."""

from __future__ import annotations

import copy
import pickle
from typing import Any, get_type_hints

import pytest
import torch
import torch.nn.functional as F
from torch.fx import Graph, GraphModule

from fxprec.passes.graph.annotations import (
    NO_OP,
    UNDECIDED,
    Annotations,
    Precision,
    Rule,
    clean_path,
    notes,
)
from fxprec.passes.graph.subgraphs import every_graph
from fxprec.passes.runner import PIPELINE

#: Field -> the passes that write it.
WRITERS = {name: {*hint.__metadata__} for name, hint in get_type_hints(Annotations, include_extras=True).items()}
NAMES = [step.__name__ for step in PIPELINE]


def written(gm: GraphModule) -> dict[tuple[int, str], tuple[Any, dict[str, Any]]]:
    """(graph, node) -> what the node calls, and its annotations."""
    return {
        (number, node.name): ((node.op, node.target), {key: node.meta[key] for key in WRITERS if key in node.meta})
        for number, each in enumerate(every_graph(gm))
        for node in each.graph.nodes
    }


def attention(ids, table, w, w3):
    x = F.embedding(ids, table)
    query, key, value = F.linear(F.layer_norm(x, (8,)), w3).chunk(3, -1)
    scores = (query @ key.transpose(-1, -2)) * 8**-0.5
    x = x + F.linear(scores.masked_fill(scores > 1.0, -1e30).softmax(-1) @ value, w)
    return x + F.linear(F.gelu(F.linear(F.layer_norm(x, (8,)), w)), w)


def convolutions(x, w, mean, var, head, bias, target):
    """A bias that is split, in-place writes, sums and a loss."""
    y = F.relu(F.batch_norm(F.conv2d(x, w), mean, var, training=True), inplace=True)
    logits = F.dropout(F.gelu(F.linear(y.mean((2, 3)), head, bias)), 0.1)
    logits += 1.0
    return F.cross_entropy(logits, target), logits.sum()


CASES = {
    "attention": (attention, (torch.arange(6).view(1, 6), torch.randn(9, 8), torch.randn(8, 8), torch.randn(24, 8))),
    "convolutions": (
        convolutions,
        (torch.randn(2, 3, 5, 5), torch.randn(4, 3, 3, 3), torch.zeros(4), torch.ones(4), torch.randn(5, 4),
         torch.randn(5), torch.tensor([1, 2])),
    ),
}  # fmt: skip


@pytest.mark.parametrize("settings", [{}, {"regions": "triton"}, {"level": "O2"}, {"placement": "autocast"}], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_a_pass_writes_its_own_fields_of_nodes_that_are_there(tools, case, settings):
    function, inputs = CASES[case]
    gm, context = tools.traced(function, *inputs), tools.context(**settings)
    seen = {"capture"}
    for step in PIPELINE:
        before = written(gm)
        gm = step(gm, context).gm
        for key, (call, now) in written(gm).items():
            if key not in before or before[key][0] != call:
                continue  # a node that the pass made, or made another one of
            was = before[key][1]
            changed = {field for field in WRITERS if (field in was, was.get(field)) != (field in now, now.get(field))}
            assert all(step.__name__ in WRITERS[field] for field in changed), (step.__name__, key, changed)
            seen |= {step.__name__} if changed else set()
    assert seen >= {"canonicalize", "propagate", "decide"}


def test_every_writer_is_capture_or_a_pass():
    assert set().union(*WRITERS.values()) <= {"capture", "pack", *NAMES}


def test_what_nobody_wrote_has_an_answer_and_is_not_stated():
    node = Graph().placeholder("x")
    assert notes(node).op is NO_OP and notes(node).precision is UNDECIDED and not notes(node).inserted
    assert not any(notes(node).state(field) for field in WRITERS)
    assert node.meta == {}, "asking writes nothing"


def test_fields_lie_in_meta_and_go_with_copies():
    graph = Graph()
    x = graph.placeholder("x")
    notes(x).precision = Precision.arriving(None, torch.float32, Rule.KEEP, "a test")
    assert x.meta["precision"] is notes(x).precision
    graph.output(x)
    copied = next(iter(copy.deepcopy(graph).nodes))
    assert notes(copied).precision == notes(x).precision
    notes(x).discard("precision")
    assert notes(x).precision is UNDECIDED and "precision" not in x.meta
    notes(x).discard("precision")  # nothing is there to delete


def test_precisions_are_pickled():
    for precision in (Precision(torch.bfloat16, torch.bfloat16, torch.bfloat16, Rule.LOW, "a test"), UNDECIDED):
        again = pickle.loads(pickle.dumps(precision))
        assert again == precision and type(again.reads) is type(precision.reads)


@pytest.mark.parametrize(
    ("written", "path"),
    [
        ("L['self']._modules['fc']", "fc"),
        ("L['self'].blocks.0.fc", "blocks.0.fc"),
        ("L['self'].__dict__['_modules']['blocks'].0.__dict__['_modules']['fc']", "blocks.0.fc"),
        ("L['self'].blocks._modules['0'].__dict__['_parameters']['weight']", "blocks.0.weight"),
    ],
)
def test_paths_are_those_that_users_know(written, path):
    assert clean_path(written) == path
