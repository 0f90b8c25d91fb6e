"""report: every node with dtypes, rule, reason and source line; the headline's figures; text and data forms."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import re
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from rich.console import Console
from torch import nn

import fxprec
from fxprec.errors import ConversionError, NotCapturedError
from fxprec.passes.graph.annotations import Rule


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(8, 16)
        self.norm = nn.LayerNorm(16)
        self.fc2 = nn.Linear(16, 4)

    def forward(self, x):
        return F.softmax(self.fc2(self.norm(F.gelu(self.fc1(x)))), -1)


class Dropping(Net):
    def forward(self, x):
        return F.dropout(super().forward(x), training=self.training)


class Breaking(Net):
    def forward(self, x):
        hidden = self.fc1(x)
        torch._dynamo.graph_break()
        return self.fc2(hidden)


@pytest.fixture
def model():
    return fxprec.convert(Net(), (torch.randn(6, 8),), dtype=torch.bfloat16).module


def row(report, op, graph=0):
    (found,) = [row for row in report.graphs[graph].rows if row.op == op and row.kind == "op"]
    return found


def test_a_row_says_what_the_graph_does_and_where_it_comes_from(model):
    softmax = row(fxprec.report(model), "softmax")
    assert (softmax.compute, softmax.output, softmax.rule) == ("float32", "float32", "full")
    assert softmax.why
    assert re.fullmatch(r"tests/inspection/test_report\.py:\d+", softmax.source)
    linears = [row for row in fxprec.report(model).graphs[0].rows if row.op == "linear"]
    assert [(row.module, row.compute, row.rule) for row in linears] == [
        ("fc1", "bfloat16", "low"),
        ("fc2", "bfloat16", "low"),
    ]
    assert (softmax.original, {row.original for row in linears}, softmax.served) == ("", {"float32"}, "")


def test_where_no_floats_are_there_is_nothing_to_decide():
    def f(x):
        return x.reshape(x.size(0), -1).exp()

    size = row(fxprec.report(fxprec.convert(f, (torch.randn(2, 2, 2),)).module), "size")
    assert (size.compute, size.rule, size.why) == ("-", "-", "no floats")


def test_the_text_holds_every_node_but_shadows_and_no_absolute_path(model):
    report = fxprec.report(model)
    text = str(report.nodes)
    assert repr(report) == str(report) and repr(report.nodes) == text
    lines = {line.split()[0] for line in text.split("\n") if line.strip()}
    assert {entry.op for entry in report.graphs[0].rows}.isdisjoint({"output", "get_attr"})
    for entry in report.graphs[0].rows:
        assert (entry.node in lines) == (entry.kind != "shadow"), entry.node
    assert not re.search(r"(^|\s)/\w+/", text)
    assert len(text.split("\n")) == 2 + len([entry for entry in report.graphs[0].rows if entry.kind != "shadow"])


def test_the_headline_counts_what_is_in_the_graph(model):
    headline = fxprec.report(model).headline
    nodes = list(fxprec.graph_module(model).graph.nodes)
    casts = [node for node in nodes if node.meta.get("inserted")]
    of_weights = [node for node in casts if node.args[0].op == "get_attr"]
    assert headline.shadow_casts == len(of_weights) == 4
    assert headline.casts == len(casts) - len(of_weights)
    computing = [n for n in nodes if n.op.startswith("call") and n not in casts and n.meta["precision"].compute]
    assert sum(headline.computes.values()) + sum(headline.views.values()) == len(computing)
    assert headline.products == {"bfloat16": 2}
    assert headline.computes["bfloat16"] >= 2
    assert (headline.captures, headline.graphs, headline.breaks, dict(headline.net)) == (1, 1, 0, {})
    assert str(headline).startswith("Net: O1, bfloat16, mincut: all 2 matrix products in bfloat16, ")
    assert str(headline) == str(fxprec.report(model))


def test_bytes_of_weights_and_activations_are_separate(model):
    headline = fxprec.report(model).headline
    parameters = sum(p.numel() for p in model.parameters())
    lowered = sum(p.numel() for name, p in model.named_parameters() if name.startswith("fc"))
    assert headline.weights.parameters == {"float32": 4 * parameters}
    assert headline.weights.shadow_bytes == 2 * lowered
    written = headline.activations
    assert written.original == 4 * 6 * (16 + 16 + 16 + 4 + 4)
    assert written.unknown == 0
    assert written.rewritten - written.casts < written.original


def test_bytes_are_unknown_without_shapes():
    model, _ = fxprec.convert(Net(), dtype=torch.bfloat16)
    headline = fxprec.report(model).headline
    assert headline.activations.values == 0
    assert headline.activations.unknown > 0
    assert "example_inputs" in str(headline)


def test_folded_casts_are_counted():
    def f(x, w):
        return F.linear(F.linear(x, w).float().bfloat16(), w)

    model, _ = fxprec.convert(f, (torch.randn(4, 4), torch.randn(4, 4)), dtype=torch.bfloat16)
    assert fxprec.report(model).headline.folded > 0


def test_data_is_json(model):
    report = fxprec.report(model)
    data = json.loads(json.dumps(report.to_dict()))
    assert data["headline"]["computes"] == report.headline.computes
    assert data["headline"]["weights"]["shadows"] == 4
    assert [entry["node"] for entry in data["graphs"][0]["rows"]] == [entry.node for entry in report.graphs[0].rows]


def test_rich_prints_it(model):
    out = io.StringIO()
    Console(file=out, width=100, force_terminal=True).print(fxprec.report(model).nodes)
    assert "\x1b[32mbfloat16" in out.getvalue()
    assert "softmax" in out.getvalue()


def test_each_graph_has_a_section():
    model, _ = fxprec.convert(Dropping(), dtype=torch.bfloat16)
    model(torch.randn(2, 8))
    model.eval()
    model(torch.randn(2, 8))
    report = fxprec.report(model)
    assert len(report.graphs) == len(fxprec.graphs(model)) == 2
    assert "graph 1 of 2 (training): (x)" in str(report.nodes) and "graph 2 of 2 (eval): (x)" in str(report.nodes)


def test_the_headline_counts_the_present_mode_and_the_other_one_apart():
    model = fxprec.convert(Dropping(), dtype=torch.bfloat16).module
    model(torch.randn(2, 8))
    training = fxprec.report(model).headline
    assert (training.graphs, training.other_mode) == (1, 0) and "apart" not in str(training)
    model.eval()
    assert fxprec.report(model).headline == training  # no other graph is known yet
    model(torch.randn(2, 8))
    ran = fxprec.report(model).headline
    assert (ran.graphs, ran.other_mode) == (1, 1) and "; 1 of the other mode apart" in str(ran)
    assert ran.casts == training.casts and ran.activations.values == training.activations.unknown
    assert ran.weights == training.weights


@pytest.mark.parametrize("capture", ["dynamo", "symbolic"])
def test_the_headline_counts_what_the_last_call_ran(capture):
    """As a last batch that is smaller is captured anew: twice as many products run in no forward."""

    class Sized(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(8, 8)

        def forward(self, x, times=1):
            for _ in range(times):
                x = self.fc(x)
            return x

    model = fxprec.convert(Sized(), dtype=torch.bfloat16, capture=capture).module
    model(torch.randn(4, 8))
    once = fxprec.report(model).headline
    assert (once.products, once.other_calls) == ({"bfloat16": 1}, 0) and "apart" not in str(once)
    model(torch.randn(4, 8), times=3)
    report = fxprec.report(model)
    assert (report.headline.products, report.headline.graphs) == ({"bfloat16": 3}, 1)
    assert "; 1 that the last call did not run apart" in str(report)
    assert [graph.counts for graph in report.graphs] == [False, True] and not report.headline.other_mode
    if capture == "dynamo":  # of static graphs it is the one captured last
        model(torch.randn(4, 8))
        assert fxprec.report(model).headline.products == once.products


@pytest.mark.parametrize("flags", [(None, object()), (object(), None), (None, object(), object(), object())])
def test_a_static_graph_and_dynamos_of_the_same_method_do_not_count_twice(flags):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(8, 8)

        def forward(self, x, flag=None):
            return self.fc(x) if flag is None else self.fc(self.fc(x))

    model, x = fxprec.convert(Net(), dtype=torch.bfloat16).module, torch.randn(2, 8)
    # dynamo takes the call with an object, and the others are static.
    for flag in flags:
        model(x, flag)
    assert len(fxprec.graphs(model)) == 2
    assert fxprec.report(model).headline.products == {"bfloat16": 1 if flags[-1] is None else 2}


def test_pieces_between_breaks_are_counted_together():
    class Broken(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            x = self.first(x)
            torch._dynamo.graph_break()
            return self.last(x)

    model = fxprec.convert(Broken(), dtype=torch.bfloat16, capture="dynamo").module
    for rows in (4, 6, 7):
        model(torch.randn(rows, 8))
    headline = fxprec.report(model).headline
    assert (headline.products, headline.graphs) == ({"bfloat16": 2}, 2) and headline.other_calls > 0


def test_breaks_and_the_net_are_told():
    model, _ = fxprec.convert(Breaking(), (torch.randn(2, 8),), dtype=torch.bfloat16, capture="dynamo")
    headline = fxprec.report(model).headline
    assert headline.graphs == 2
    assert headline.breaks == 1
    (where,) = headline.net
    assert re.match(r"tests/inspection/test_report\.py:\d+ in forward", where)
    assert "graph break" in str(headline)
    assert "(runs under torch.autocast)" in str(headline)
    untouched, _ = fxprec.convert(Breaking(), (torch.randn(2, 8),), level="O0", capture="dynamo")
    assert "(runs as it is)" in str(fxprec.report(untouched).headline)


def test_why_static_capture_was_declined():
    class Branch(Net):
        def forward(self, x):
            return self.fc1(x) if x.sum() > 0 else self.fc1(-x)

    model, _ = fxprec.convert(Branch(), (torch.ones(2, 8),), dtype=torch.bfloat16)
    headline = fxprec.report(model).headline
    assert headline.not_static
    assert "not static" in str(headline)


def test_a_policy_shows_as_the_reason():
    policy = fxprec.Policy.preset("O1").override(modules={"fc2": Rule.FULL})
    model, _ = fxprec.convert(Net(), dtype=torch.bfloat16, policy=policy)
    (fc2,) = [row for row in fxprec.report(model).graphs[0].rows if row.module == "fc2" and row.kind == "op"]
    assert fc2.compute == "float32"
    assert "override" in fc2.why


def test_a_bare_rewritten_graph(model):
    gm = fxprec.graph_module(model)
    report = fxprec.report(gm)
    (whole,) = fxprec.report(model).graphs
    assert report.graphs == (dataclasses.replace(whole, method="", mode=""),)
    assert (whole.method, whole.mode, whole.counts) == ("forward", "training", True)
    assert report.headline.settings == ""


def test_before_a_lazy_capture_it_says_what_to_do():
    model, _ = fxprec.convert(Breaking(), dtype=torch.bfloat16, capture="dynamo")
    with pytest.raises(NotCapturedError, match="call it once"):
        fxprec.report(model)


def test_not_converted():
    with pytest.raises(ConversionError, match=r"fxprec\.convert"):
        fxprec.report(Net())


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="wants fork")
def test_the_first_report_of_a_process_draws_no_random_numbers():
    """rich does when it is imported: by a report's text, and in a fork by a headline's colours."""
    script = """
import os, random, sys, torch, fxprec
model = fxprec.convert(torch.nn.Linear(2, 2), dtype=torch.bfloat16).module
assert not any(name.partition(".")[0] == "rich" for name in sys.modules)
fork = os.fork()  # which seeds the child's anew
state = random.getstate()
if fork:
    str(fxprec.report(model))
    assert os.waitpid(fork, 0) == (fork, 0)
else:
    fxprec.report(model).headline.__rich__()
assert "rich.style" in sys.modules and random.getstate() == state
"""
    subprocess.run([sys.executable, "-c", script], check=True)


FACTOR = 2.0


def test_it_says_what_a_static_graph_is_guarded_by() -> None:
    class Scaling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.scale, self.table = nn.Linear(2, 2), 0.5, {"a": 1.0}

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x) * self.scale * self.table["a"] * FACTOR

    x = torch.randn(3, 2)
    model, _ = fxprec.convert(Scaling(), (x,), dtype=torch.bfloat16)
    assert {*fxprec.report(model).graphs[0].guarded} == {"scale", "table", "the global FACTOR"}
    assert "\nguarded: scale, " in str(fxprec.report(model).nodes)
    by_dynamo, _ = fxprec.convert(Scaling(), (x,), dtype=torch.bfloat16, capture="dynamo")
    assert fxprec.report(by_dynamo).graphs[0].guarded == () and "guarded" not in str(fxprec.report(by_dynamo).nodes)
    plain, _ = fxprec.convert(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), (x,), dtype=torch.bfloat16)
    assert fxprec.report(plain).graphs[0].guarded == ()


def test_many_guards_are_counted() -> None:
    class Many(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2)
            for number in range(15):
                setattr(self, f"k{number}", float(number))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x) * sum(getattr(self, f"k{number}") for number in range(15))

    model, _ = fxprec.convert(Many(), (torch.randn(3, 2),), dtype=torch.bfloat16)
    assert len(fxprec.report(model).graphs[0].guarded) == 15
    assert "k11, 3 more\n" in str(fxprec.report(model).nodes)
