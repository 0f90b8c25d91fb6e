"""The source of a captured graph waits until somebody asks for the graph; the collector, until graphs are made."""

from __future__ import annotations

import copy
import gc
import pickle

import pytest
import torch
from torch import nn
from torch.fx import GraphModule, symbolic_trace
from torch.fx._lazy_graph_module import _LazyGraphModule

import fxprec
import fxprec.conversion
from fxprec.capture.collection import no_collection
from fxprec.capture.lazy_code import holding, with_code, without_code
from fxprec.module import conversion_of

X = torch.randn(2, 4)


def net():
    return nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 2)).eval()


@pytest.fixture(params=["symbolic", "dynamo"])
def converted(request):
    """A converted model that was called, by either capture; a graph of dynamo's returns a tuple."""
    module, _ = fxprec.convert(net(), (X,), capture=request.param)
    module(X)
    return module


class TestSource:
    def test_none_is_written_to_convert_and_run(self, converted):
        (gm,) = conversion_of(converted).graphs
        assert isinstance(gm, _LazyGraphModule) and "_code" not in vars(gm)

    @pytest.mark.parametrize("asked", [fxprec.graph_module, lambda module: fxprec.graphs(module)[0]])
    def test_who_asks_gets_a_plain_graph_module(self, converted, asked):
        (made,) = conversion_of(converted).graphs
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
            lambda gm: pickle.loads(pickle.dumps(gm)),
            lambda gm: torch.export.export(gm, (X,)).module(),
            symbolic_trace,
            lambda gm: torch.compile(gm, backend="eager"),
        ],
        ids=["deepcopy", "pickle", "export", "trace", "compile"],
    )
    def test_what_others_do_with_it(self, through):
        module, _ = fxprec.convert(net(), (X,))
        assert torch.equal(through(fxprec.graph_module(module))(X), module(X))

    def test_a_graph_without_source_runs_too(self):
        gm = without_code(net(), symbolic_trace(net()).graph, "Named")
        assert type(gm).__name__ == "Named" and "_code" not in vars(gm)
        assert gm(X).shape == (2, 2) and "_code" in vars(gm)

    def test_what_holds_tensors_only_has_them_at_their_paths(self):
        model = net()
        model.register_buffer("table", torch.ones(2), persistent=True)
        tensors = {**dict(model.named_parameters()), "table": model.table, "0.deep.er.table": torch.ones(1)}
        graph = symbolic_trace(net()).graph
        gm = holding(tensors, graph, "Named")
        assert type(gm).__name__ == "Named" and "_code" not in vars(gm)
        assert gm.graph is graph and graph.owning_module is gm
        found = {**dict(gm.named_parameters()), **dict(gm.named_buffers())}
        assert found.keys() == tensors.keys() and all(found[path] is tensors[path] for path in tensors)
        assert dict(gm.named_parameters()).keys() == dict(model.named_parameters()).keys()

    def test_a_plain_graph_module_stays_the_one_it_is(self):
        gm = symbolic_trace(net())
        kind, code = type(gm), gm._code
        gm.graph.erase_node(gm.graph.call_function(torch.add, (1, 2)))
        with_code(gm)
        assert type(gm) is kind and gm._code is code and isinstance(gm, GraphModule)


class TestCollection:
    @pytest.mark.parametrize("capture", ["symbolic", "dynamo"])
    def test_it_waits_while_a_graph_is_rewritten(self, monkeypatch, capture):
        enabled = []
        run_passes = fxprec.conversion.run_passes

        def noted(*args):
            enabled.append(gc.isenabled())
            return run_passes(*args)

        monkeypatch.setattr(fxprec.conversion, "run_passes", noted)
        assert gc.isenabled()
        fxprec.convert(net(), (X,), capture=capture)
        assert enabled == [False] and gc.isenabled()

    def test_it_runs_again_after_an_error(self):
        with pytest.raises(KeyError), no_collection():
            assert not gc.isenabled()
            raise KeyError
        assert gc.isenabled()

    def test_what_was_made_counts_as_old(self):
        with no_collection():
            made = [[] for _ in range(1000)]
        young = {id(each) for generation in (0, 1) for each in gc.get_objects(generation)}
        expected = 1000 if gc.get_freeze_count() else 0  # Python 3.12 starts with frozen objects
        assert len(young.intersection(map(id, made))) == expected

    def test_what_a_program_froze_stays_frozen(self):
        gc.freeze()
        try:
            frozen = gc.get_freeze_count()
            with no_collection():
                pass
            assert gc.get_freeze_count() >= frozen - 100  # some may have been freed
        finally:
            gc.unfreeze()

    def test_who_turned_it_off_keeps_it_off(self):
        gc.disable()
        try:
            with no_collection():
                assert not gc.isenabled()
            assert not gc.isenabled()
        finally:
            gc.enable()
