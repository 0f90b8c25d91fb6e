"""Dynamic capture: what ran silently in FP32 before its cure runs lowered, in our graphs or in the net."""

from __future__ import annotations

import copy
import gc
import io
import operator
import weakref

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import fxprec
from fxprec.capture.dynamo import analysis
from fxprec.capture.user_code import place
from fxprec.model.conversion import conversion_of
from fxprec.model.dynamic import DynamicGraphs
from fxprec.torch_internals import OpMode

LOW = torch.bfloat16


class Mlp(nn.Module):
    """Reads a shape in a branch, so that symbolic tracing declines it."""

    def __init__(self, dim=8):
        super().__init__()
        self.up = nn.Linear(dim, 16)
        self.down = nn.Linear(16, dim)

    def forward(self, x):
        if x.shape[0] > 100:
            x = x * 2
        return self.down(F.relu(self.up(x)))


class Broken(nn.Module):
    """A graph break inside a loop over its blocks, which makes dynamo skip the whole frame."""

    def __init__(self, blocks=3):
        super().__init__()
        self.blocks = nn.ModuleList(Mlp() for _ in range(blocks))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
            torch._dynamo.graph_break()
        return x


def step(model, x):
    model.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    return loss.item(), {name: p.grad.clone() for name, p in model.named_parameters()}


def close(ours, reference):
    assert ours[0] == pytest.approx(reference[0], rel=0.05)
    for name, gradient in ours[1].items():
        assert gradient.dtype is torch.float32
        assert F.cosine_similarity(gradient.flatten(), reference[1][name].flatten(), dim=0) > 0.98, name


def test_a_dynamic_forward_is_captured_at_its_first_call(tools):
    model = Mlp()
    x = torch.randn(4, 8)
    reference = step(copy.deepcopy(model), x)
    converted, _ = fxprec.convert(model)
    with pytest.raises(fxprec.NotCapturedError, match="call it once"):
        _ = converted.graph
    close(step(converted, x), reference)
    assert tools.matmul_dtypes(converted, x) == {LOW: 2}
    assert conversion_of(converted).net == {}
    assert "up.weight" in [node.target for node in converted.graph.find_nodes(op="get_attr")]


@pytest.mark.slow
def test_every_conversion_of_one_class_is_lowered(tools):
    x = torch.randn(4, 8)
    for _ in range(12):
        converted, _ = fxprec.convert(Mlp())
        assert tools.matmul_dtypes(converted, x) == {LOW: 2}
        assert len(fxprec.graphs(converted)) == 1


def test_a_break_inside_a_loop_over_blocks_is_lowered(tools):
    model = Broken()
    x = torch.randn(4, 8)
    reference = step(copy.deepcopy(model), x)
    converted, _ = fxprec.convert(model)
    ours = step(converted, x)
    close(ours, reference)
    assert converted(x).dtype is torch.float32
    assert tools.matmul_dtypes(converted, x) == {LOW: 6}
    assert conversion_of(converted).net  # and says so


def test_under_a_dispatch_mode_the_net_serves_and_our_graphs_come_back(tools):
    converted, _ = fxprec.convert(Mlp())
    x = torch.randn(4, 8)
    with FlopCounterMode(display=False) as flops:
        out = converted(x)
    assert out.dtype is torch.float32
    assert flops.get_total_flops() == 2 * 2 * 4 * 8 * 16
    assert "FlopCounterMode" in str(conversion_of(converted).net)
    converted(x)
    assert len(fxprec.graphs(converted)) == 1
    assert tools.matmul_dtypes(converted, x) == {LOW: 2}


def test_under_a_dispatch_mode_matmuls_are_low():
    seen = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if "mm" in func._schema.name:
                seen.append(args[-1].dtype)
            return func(*args, **(kwargs or {}))

    converted, _ = fxprec.convert(Mlp())
    with Watch():
        converted(torch.randn(4, 8))
    assert seen == [LOW, LOW]


@pytest.mark.parametrize("capture", ["auto", "dynamo"])
def test_an_outer_compile_keeps_our_graphs(tools, capture):
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    converted, _ = fxprec.convert(model, capture=capture)
    x = torch.randn(4, 8)
    compiled = torch.compile(converted, backend="eager")
    assert tools.matmul_dtypes(compiled, x) == {LOW: 2}
    outer = torch.compile(lambda x: converted(x * 2) + 1, backend="eager")
    assert tools.matmul_dtypes(outer, x) == {LOW: 2}
    assert torch.equal(outer(x), converted(x * 2) + 1)


@pytest.mark.parametrize("capture", ["auto", "dynamo"])
def test_an_outer_compile_without_breaks_is_told_what_to_compile(tools, capture):
    """Converted models are a break in it; compiled by themselves they run their graphs."""
    converted = fxprec.convert(Mlp(), dtype=LOW, capture=capture).module
    x = torch.randn(4, 8)
    assert LOW in tools.matmul_dtypes(torch.compile(converted, backend="eager", fullgraph=True), x)
    outer = torch.compile(lambda x: converted(x) + 1, backend="eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"compile one, use fxprec\.graph_module\(model\)"):
        outer(x)
    graph = fxprec.graph_module(converted)
    assert torch.equal(torch.compile(lambda x: graph(x) + 1, backend="eager", fullgraph=True)(x), converted(x) + 1)


def test_export_is_refused_and_the_graph_module_exports():
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU())
    converted, _ = fxprec.convert(model)
    x = torch.randn(4, 8)
    for strict in (False, True):
        with pytest.raises(Exception, match=r"fxprec\.graph_module"):
            torch.export.export(converted, (x,), strict=strict)
    exported = torch.export.export(fxprec.graph_module(converted), (x,))
    assert torch.equal(exported.module()(x), converted(x))


class Checkpointed(nn.Module):
    def __init__(self, reentrant=False):
        super().__init__()
        self.first, self.second = Mlp(), Mlp()
        self.dropout = nn.Dropout(0.5)
        self.reentrant = reentrant
        self.calls = 0

    def body(self, x):
        return self.dropout(self.second(x))

    def forward(self, x):
        return checkpoint(self.body, self.first(x), use_reentrant=self.reentrant)


def test_activation_checkpointing_is_kept_and_lowered(tools):
    model = Checkpointed()
    x = torch.randn(4, 8)
    converted, _ = fxprec.convert(copy.deepcopy(model))
    torch.manual_seed(3)
    reference = step(model, x)
    torch.manual_seed(3)
    ours = step(converted, x)
    close(ours, reference)  # the same dropout mask in the forward and in the recomputation
    assert tools.matmul_dtypes(converted, x) == {LOW: 4}
    plain = tools.matmul_dtypes(lambda: Mlp()(x).sum().backward())
    recomputed = tools.matmul_dtypes(lambda: converted(x).sum().backward())
    assert recomputed[LOW] > 2 * plain[torch.float32]  # the body's two matmuls run again in the backward


class Tagger(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        self.rnn = kind(8, 8, batch_first=True, bidirectional=True)
        self.head = nn.Linear(16, 5)

    def forward(self, ids):
        return self.head(self.rnn(self.embedding(ids))[0])


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_models(tools, kind):
    model = Tagger(kind)
    ids = torch.randint(20, (2, 7))
    reference = step(copy.deepcopy(model), ids)
    converted, _ = fxprec.convert(model)
    close(step(converted, ids), reference)
    assert torch.float32 not in tools.matmul_dtypes(converted, ids)
    assert len(fxprec.graphs(converted)) >= 1


@pytest.mark.slow
def test_transformer_encoder_trains_and_evaluates(tools):
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    x = torch.randn(2, 5, 8)
    reference = step(copy.deepcopy(model), x)
    converted, _ = fxprec.convert(model)
    close(step(converted, x), reference)
    assert torch.float32 not in tools.matmul_dtypes(converted, x)
    expected = copy.deepcopy(fxprec.revert(copy.deepcopy(converted))).eval()(x)
    assert torch.allclose(converted.eval()(x), expected, atol=0.05)


def test_a_hook_on_a_submodule_added_after_capture_fires(tools):
    converted, _ = fxprec.convert(Mlp())
    x = torch.randn(4, 8)
    converted(x)
    seen = []
    handle = converted.up.register_forward_hook(lambda module, args, out: seen.append(out.dtype))
    assert tools.matmul_dtypes(converted, x) == {LOW: 2}
    assert len(seen) == 1
    handle.remove()
    converted(x)
    assert len(seen) == 1


def test_a_hook_added_before_conversion_fires(tools):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    seen = []
    model[0].register_forward_pre_hook(lambda module, args: seen.append(1))
    converted, _ = fxprec.convert(model)
    assert tools.matmul_dtypes(converted, torch.randn(2, 8)) == {LOW: 2}
    assert seen == [1]


def test_a_submodule_replaced_after_capture_is_used():
    converted, _ = fxprec.convert(Mlp())
    x = torch.randn(4, 8)
    converted(x)
    converted.down = nn.Linear(16, 3)
    assert converted(x).shape == (4, 3)
    static, _ = fxprec.convert(nn.Sequential(nn.Linear(8, 8)))
    static(x)
    static[0] = nn.Linear(8, 5)
    assert static(x).shape == (4, 5)


def test_changing_batch_sizes_and_empty_batches(tools):
    converted, _ = fxprec.convert(Mlp())
    for batch in (4, 6, 0, 1, 9, 4):
        out = converted(torch.randn(batch, 8))
        assert out.shape == (batch, 8)
        assert out.dtype is torch.float32
    assert tools.matmul_dtypes(converted, torch.randn(5, 8)) == {LOW: 2}


class MixedScatter(nn.Module):
    """What eager autocast refuses: scatter_add of a low source into an FP32 tensor."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x, index):
        if x.shape[0] > 100:
            x = x * 2
        return torch.zeros(4, 8).scatter_add(0, index, self.fc(x))


def test_what_fails_under_autocast_is_captured_without_it(tools):
    model = MixedScatter()
    x, index = torch.randn(6, 8), torch.randint(4, (6, 8))
    with pytest.raises(RuntimeError), torch.autocast("cpu", dtype=LOW):
        model(x, index)
    expected = model(x, index)
    converted, _ = fxprec.convert(model)
    assert torch.allclose(converted(x, index), expected, atol=0.05)
    assert tools.matmul_dtypes(converted, x, index) == {LOW: 1}


def test_errors_of_the_model_are_its_own():
    converted, _ = fxprec.convert(Mlp())
    with pytest.raises(RuntimeError, match=r"shape|size|dim"):
        converted(torch.randn(4, 9))
    assert converted(torch.randn(4, 8)).shape == (4, 8)


def test_copies_and_files_are_converted_too(tools):
    converted, _ = fxprec.convert(Mlp())
    x = torch.randn(4, 8)
    expected = converted(x)
    copied = copy.deepcopy(converted)
    assert tools.matmul_dtypes(copied, x) == {LOW: 2}
    buffer = io.BytesIO()
    torch.save(converted, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    assert torch.equal(loaded(x), expected)
    with torch.no_grad():
        copied.up.weight.add_(1)
    assert torch.equal(converted(x), expected)


def test_sizes_are_asked_of_the_inputs():
    """dynamo passes a size that varies as an argument of its own; a graph that one can call takes tensors alone."""

    class Flat(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(8, 8)

        def forward(self, x):
            batch, time, dim = x.shape
            return self.fc(x).reshape(batch * time, dim) / time

    converted, _ = fxprec.convert(Flat(), capture="dynamo")
    for batch, time in ((2, 3), (3, 4), (4, 5)):
        converted(torch.randn(batch, time, 8))
    x = torch.randn(6, 7, 8)
    expected = converted(x)
    gm = fxprec.graph_module(converted)
    assert len(fxprec.graphs(converted)) == 2
    assert [node.name for node in gm.graph.find_nodes(op="placeholder")] == ["x"]
    assert torch.equal(gm(x), expected)
    assert "size = x.size(0)" in gm.code and "size_1 = x.size(1)" in gm.code


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_numbers_of_numpy_in_every_grad_mode(mode):
    class Numpy(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.scale = nn.Linear(8, 8), np.float32(2)

        def forward(self, x):
            half = np.random.choice([0.5, 0.5])
            return self.fc(x) * float(half) * float(self.scale) + torch.from_numpy(
                np.ones(8, np.float32) * np.float32(half)
            )

    model, x = fxprec.convert(Numpy(), dtype=LOW, capture="dynamo").module, torch.randn(4, 8)
    with mode():
        for _ in range(2):
            output = model(x)
    torch.testing.assert_close(output, model.fc(x) + 0.5, rtol=0.05, atol=0.05)
    model.scale = np.float32(4)
    with mode():
        torch.testing.assert_close(model(x), model.fc(x) * 2 + 0.5, rtol=0.05, atol=0.05)


def test_the_graphs_of_a_model_go_with_it():
    """dynamo keeps what it was given as a backend's result for good."""
    model = fxprec.convert(Mlp(), dtype=LOW, capture="dynamo").module
    model(torch.randn(4, 8)).sum().backward()
    (captured,) = conversion_of(model).captured
    kept = [weakref.ref(each) for each in (captured.gm, captured.program.gm, model.up.weight)]
    del model, captured
    gc.collect()
    assert [each() for each in kept] == [None, None, None]


@pytest.mark.parametrize("alive", [True, False])
def test_beyond_its_limit_dynamo_may_run_what_was_captured_for_another_model(alive, monkeypatch):
    """Before torch 2.13 it then takes what fits from the caches of all: values are the model's own, whoever lives."""
    monkeypatch.setattr(analysis, "ISOLATES", False)
    monkeypatch.setattr(analysis, "_OF_ITS_OWN", {})
    first, other = Broken(2), Mlp()
    model, _ = fxprec.convert(first, dtype=LOW, capture="dynamo")
    model(torch.randn(4, 8))
    x = torch.randn(4, 8, requires_grad=True) * 1
    died = weakref.ref(model)
    if not alive:
        del model, first
        gc.collect()
    assert (died() is not None) == alive
    run_only = torch._dynamo.run(Mlp.forward)
    with torch.autocast("cpu", LOW, cache_enabled=False):
        torch.testing.assert_close(run_only(other, x), other(x), atol=0.02, rtol=0.02, check_dtype=False)


def test_dynamo_compiles_nothing_of_what_looks_at_ops():
    seen = []

    def touched(value):
        seen.append(torch.compiler.is_compiling())
        return value * 1

    class Looks(OpMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return touched(func(*args, **kwargs or {}))

    graphs = []

    def backend(gm, inputs):
        graphs.append([node.target for node in gm.graph.nodes if node.op.startswith("call")])
        return gm.forward

    def broken(x):
        for _ in range(2):
            x = x + 1
            torch._dynamo.graph_break()
        return x

    with Looks():
        torch.compile(broken, backend=backend)(torch.ones(3))
    assert seen and not any(seen)
    assert not any(operator.mul in graph for graph in graphs)


@pytest.mark.parametrize("name", ["forward", "<lambda>"])
def test_a_place_behind_a_graph_break_bears_the_name_of_its_function(name):
    assert place("model.py", 12, f"torch_dynamo_resume_in_{name}_at_9") == place("model.py", "12", name)
    assert place("model.py", 12, name) == f"model.py:12 in {name}"


def test_dynamos_graph_is_kept_only_where_it_may_be_run_without_its_model(monkeypatch):
    kept = []
    for isolates in (True, False):
        monkeypatch.setattr(analysis, "ISOLATES", isolates)
        model, _ = fxprec.convert(Mlp(), dtype=LOW, capture="dynamo")
        graphs = []
        rewritten = DynamicGraphs.rewritten

        def seen(self, gm, inputs, part, rewritten=rewritten, graphs=graphs):
            graphs.append(weakref.ref(gm))
            return rewritten(self, gm, inputs, part)

        with monkeypatch.context() as patched:
            patched.setattr(DynamicGraphs, "rewritten", seen)
            model(torch.randn(4, 8))
        gc.collect()
        kept.append([each() is not None for each in graphs])
    assert kept == [[False], [True]]
