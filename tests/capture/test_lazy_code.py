"""The source of a captured graph waits until somebody asks for the graph; the collector, until graphs are made."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from torch import nn
from torch.fx import GraphModule, symbolic_trace
from torch.fx._lazy_graph_module import _LazyGraphModule

import fxprec
import fxprec.programs.packed_weights
from fxprec.capture import capturing
from fxprec.capture.capturing import fewer_collections
from fxprec.capture.lazy_code import graph_module_with, with_code
from fxprec.capture.symbolic.trace import trace_static
from fxprec.model.conversion import conversion_of

X = torch.randn(2, 4)


def _is_old(value):
    return any(each is value for each in gc.get_objects(generation=2))


def net():
    return nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 2)).eval()


@pytest.fixture(params=["symbolic", "dynamo"])
def converted(request):
    """A converted model that was called, by either capture; a graph of dynamo's returns a tuple."""
    torch._dynamo.reset()
    module, _ = fxprec.convert(net(), (X,), capture=request.param)
    module(X)
    return module


class TestSource:
    def test_none_is_written_to_convert_and_run(self, converted):
        (gm,) = [captured.gm for captured in conversion_of(converted).captured]
        assert isinstance(gm, _LazyGraphModule) and "_code" not in vars(gm)

    @pytest.mark.parametrize("asked", [fxprec.graph_module, lambda module: fxprec.graphs(module)[0]])
    def test_who_asks_gets_a_plain_graph_module(self, converted, asked):
        (made,) = [captured.gm for captured in conversion_of(converted).captured]
        name = type(made).__name__
        gm = asked(converted)
        assert gm is made and not isinstance(gm, _LazyGraphModule) and type(gm).__name__ == name
        assert gm.code == gm.recompile().src and "linear" in gm.code

    def test_it_is_written_again_at_once_after_an_edit(self):
        module, _ = fxprec.convert(net())
        gm = fxprec.graph_module(module)
        (gelu,) = [node for node in gm.graph.nodes if "gelu" in node.name]
        gelu.replace_all_uses_with(gelu.args[0])
        gm.graph.erase_node(gelu)
        assert "gelu" in gm.code
        gm.recompile()
        assert "gelu" not in gm.code

    @pytest.mark.parametrize(
        "through",
        [
            copy.deepcopy,
            lambda gm: torch.export.export(gm, (X,)).module(),
            symbolic_trace,
            lambda gm: torch.compile(gm, backend="eager"),
        ],
        ids=["deepcopy", "export", "trace", "compile"],
    )
    def test_what_others_do_with_it(self, through):
        module, _ = fxprec.convert(net(), (X,))
        assert torch.equal(through(fxprec.graph_module(module))(X), module(X))

    def test_a_graph_without_source_runs_too(self):
        model = net()
        gm = trace_static(model, ("input",), {}).gm
        assert isinstance(gm, _LazyGraphModule) and "_code" not in vars(gm)
        assert gm(X).shape == (2, 2) and "_code" in vars(gm)

    def test_what_holds_tensors_only_has_them_at_their_paths(self):
        model = net()
        model.register_buffer("table", torch.ones(2), persistent=True)
        tensors = {**dict(model.named_parameters()), "table": model.table, "0.deep.er.table": torch.ones(1)}
        graph = symbolic_trace(net()).graph
        gm = graph_module_with(tensors, graph, "Named")
        assert type(gm).__name__ == "Named" and "_code" not in vars(gm)
        assert gm.graph is graph and graph.owning_module is gm
        found = {**dict(gm.named_parameters()), **dict(gm.named_buffers())}
        assert found.keys() == tensors.keys() and all(found[path] is tensors[path] for path in tensors)
        assert dict(gm.named_parameters()).keys() == dict(model.named_parameters()).keys()

    def test_such_names_are_free_where_no_weight_is_read(self):
        model = net()
        model.add_module("graph", nn.ReLU())
        model.register_buffer("meta", torch.ones(4))
        module, _ = fxprec.convert(model)
        assert module(X).shape == (2, 2) and isinstance(module.graph, nn.ReLU)

    def test_a_graph_module_that_has_its_source_stays_the_one_it_is(self):
        gm = symbolic_trace(net())
        with_code(gm)
        kind, code = type(gm), gm._code
        gm.graph.erase_node(gm.graph.call_function(torch.add, (1, 2)))
        with_code(gm)
        assert type(gm) is kind and gm._code is code and isinstance(gm, GraphModule)


class TestCollection:
    @pytest.fixture(autouse=True)
    def threshold(self):
        """That of the process, whatever a test did."""
        before = gc.get_threshold()
        gc.set_threshold(700, 10, 5)
        yield
        gc.set_threshold(*before)

    @pytest.mark.parametrize("capture", ["symbolic", "dynamo"])
    def test_it_is_seldom_while_a_graph_is_rewritten(self, monkeypatch, capture):
        found = []
        run_passes = fxprec.programs.packed_weights.run_passes

        def noted(*args):
            found.append(gc.get_threshold())
            return run_passes(*args)

        monkeypatch.setattr(fxprec.programs.packed_weights, "run_passes", noted)
        fxprec.convert(net(), (X,), capture=capture)
        assert found == [(1_000_000, 1_000, 5)] and gc.get_threshold() == (700, 10, 5)

    def test_what_is_dropped_within_is_freed_all_the_same(self, monkeypatch):
        monkeypatch.setattr(capturing, "_NEW", 10_000)

        class Node:
            pass

        freed = []
        with fewer_collections():
            gc.collect(0)
            node = Node()
            node.itself = node
            weakref.finalize(node, freed.append, True)
            del node
            kept = [[] for _ in range(10_100)]
            assert freed and len(kept) == 10_100

    @pytest.mark.slow
    def test_what_stays_is_old_at_the_end(self, monkeypatch):
        monkeypatch.setattr(capturing, "_age_all", capturing._Aging())
        before = gc.get_freeze_count()
        gc.unfreeze()
        with fewer_collections():
            stays = [[]]
            assert not _is_old(stays)
        assert _is_old(stays) and not gc.get_freeze_count()
        if before:  # by this suite
            gc.freeze()

    @pytest.mark.slow
    def test_what_the_user_froze_stays_frozen_and_is_counted_once(self, monkeypatch):
        monkeypatch.setattr(capturing, "_age_all", capturing._Aging())
        gc.freeze()
        before = gc.get_freeze_count()
        with fewer_collections():
            stays = [[]]
        assert not _is_old(stays) and before * 0.9 < gc.get_freeze_count() <= before  # some of them may be gone
        monkeypatch.setattr(gc, "get_freeze_count", pytest.fail)
        with fewer_collections():
            pass

    def test_it_is_as_often_after_an_error(self):
        with pytest.raises(KeyError), fewer_collections():
            assert gc.get_threshold()[0] == 1_000_000
            raise KeyError
        assert gc.get_threshold() == (700, 10, 5)

    @pytest.mark.parametrize("threshold", [(0, 10, 5), (5_000_000, 20, 100)])
    def test_who_collects_never_or_seldomer_goes_on_so(self, threshold):
        gc.set_threshold(*threshold)
        with fewer_collections():
            assert gc.get_threshold() == threshold
        assert gc.get_threshold() == threshold
