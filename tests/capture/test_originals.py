"""What people put around, into and onto a converted model: each of it runs lowered, and does what it did before."""

from __future__ import annotations

import copy
import gc
import logging
import threading
import warnings
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, prune
from torch.utils.checkpoint import checkpoint

import fxprec
from fxprec.capture.dynamo import analysis as dynamo
from fxprec.model.conversion import conversion_of
from log_records import log_records

LOW = torch.bfloat16


class Static(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


class Dynamic(Static):
    """Reads a shape in a branch, so that symbolic tracing declines it."""

    def forward(self, x):
        if x.shape[0] > 100:
            x = x * 2
        return super().forward(x)


class Broken(nn.Module):
    """A graph break inside a loop: dynamo captures the blocks one by one."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Dynamic() for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
            torch._dynamo.graph_break()
        return x


@pytest.fixture(params=[Static, Dynamic])
def make(request):
    return request.param


@pytest.fixture
def pair(make):
    """A converted model and the same one in FP32."""
    reference = make()
    return fxprec.convert(copy.deepcopy(reference)).module, reference


def close(actual, expected, tolerance=0.05):
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)


# -- calls


class Choosy(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, *args, scale=1.0, mask=None, **more):
        y = self.fc(args[0]) * scale + sum(more.values())
        return y if mask is None else y * mask


@pytest.mark.parametrize("capture", ["auto", "dynamo"])
def test_variadic_and_keyword_only_arguments(tools, capture):
    reference = Choosy()
    model, _ = fxprec.convert(copy.deepcopy(reference), capture=capture)
    x = torch.randn(2, 8)
    calls = ({}, {"scale": 2.0}, {"mask": x > 0}, {"mask": None, "bias": x}, {"a": 1, "b": x})
    for keywords in calls:
        close(model(x, **keywords), reference(x, **keywords))
    assert conversion_of(model).net == {}  # before the count: dynamo of torch 2.10 takes the mode's frames, too
    for keywords in calls:
        assert tools.matmul_dtypes(model, x, **keywords) == {LOW: 1}


class Nested(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, many, named, none=None):
        return {"many": [self.fc(x) for x in many], "named": (self.fc(named["x"]), none)}


def test_containers_of_tensors(tools):
    reference = Nested()
    model, _ = fxprec.convert(copy.deepcopy(reference))
    x = torch.randn(2, 8)
    for many in ([x], [x, x + 1], (x, x, x)):
        output, expected = model(many, {"x": x}), reference(many, {"x": x})
        close(output["many"], expected["many"])
        assert output["named"][1] is None
    assert tools.matmul_dtypes(model, [x, x], {"x": x}) == {LOW: 3}


@pytest.mark.skipif(
    torch.__version__ < (2, 13), reason="dynamo of earlier versions takes no packed sequences: refused by CaptureError"
)
def test_packed_sequences(tools):
    class Tagger(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn, self.head = nn.LSTM(8, 8, batch_first=True), nn.Linear(8, 3)

        def forward(self, packed):
            return self.head(nn.utils.rnn.pad_packed_sequence(self.rnn(packed)[0], batch_first=True)[0])

    reference = Tagger()
    model, _ = fxprec.convert(copy.deepcopy(reference))
    packed = nn.utils.rnn.pack_padded_sequence(torch.randn(2, 5, 8), torch.tensor([5, 3]), batch_first=True)
    close(model(packed), reference(packed))
    assert tools.matmul_dtypes(model, packed).keys() == {LOW}


def test_sparse_inputs(tools):
    class Graph(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(8, 8)

        def forward(self, adjacency, x):
            return torch.sparse.mm(adjacency, self.fc(x))

    reference = Graph()
    model, _ = fxprec.convert(copy.deepcopy(reference))
    adjacency, x = torch.eye(4).to_sparse(), torch.randn(4, 8)
    close(model(adjacency, x), reference(adjacency, x))
    model(adjacency, x).sum().backward()
    assert LOW in tools.matmul_dtypes(model, adjacency, x)


def test_inputs_of_every_dtype(pair, tools):
    model, reference = pair
    x = torch.randn(2, 8)
    for dtype in (LOW, torch.float16):
        output = model(x.to(dtype))
        close(output.float(), reference(x))
    for dtype in (torch.float64, torch.complex64):  # refused by the original, too
        with pytest.raises(RuntimeError, match="same dtype"):
            model(x.to(dtype))
    close(model(x), reference(x))
    assert tools.matmul_dtypes(model, x) == {LOW: 2}


def test_gradients_of_inputs_are_fp32(pair):
    model, reference = pair
    x = torch.randn(2, 8, requires_grad=True)
    (ours,) = torch.autograd.grad(model(x).sum(), x)
    (theirs,) = torch.autograd.grad(reference(x).sum(), x)
    assert ours.dtype is torch.float32
    close(ours, theirs)


@pytest.mark.parametrize("capture", ["auto", "dynamo"])
def test_zero_dimensional_inputs(tools, capture):
    reference = Choosy()
    model, _ = fxprec.convert(copy.deepcopy(reference), capture=capture)
    x = torch.randn(2, 8)
    for scale in (torch.tensor(2.0), torch.tensor(2), torch.tensor(2.0, dtype=torch.float64), torch.ones(1)):
        output, expected = model(x, scale=scale), reference(x, scale=scale)
        assert output.dtype is expected.dtype
        close(output, expected)
    assert tools.matmul_dtypes(model, x, scale=torch.tensor(2.0)) == {LOW: 1}


def test_recursion_and_threads(tools):
    class Recursive(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(8, 8)

        def forward(self, x, depth=2):
            y = self.fc(x)
            return self(y, depth - 1) if depth else y

    reference = Recursive()
    model, _ = fxprec.convert(copy.deepcopy(reference), capture="dynamo")
    x = torch.randn(2, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        close(model(x), reference(x))
    assert tools.matmul_dtypes(model, x) == {LOW: 3}


@pytest.mark.slow
def test_dynamic_captures_in_several_threads(tools):
    models = [fxprec.convert(Dynamic()).module for _ in range(4)]
    config = dict(torch._dynamo.config.get_config_copy())  # type: ignore[attr-defined]
    counts, start = [], threading.Barrier(8)

    def work(model, batch):
        start.wait(60)
        model(torch.randn(batch, 8)).sum().backward()
        counts.append(tools.matmul_dtypes(model, torch.randn(batch, 8)))

    threads = [threading.Thread(target=work, args=(model, batch)) for model in models for batch in (2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert counts == [{LOW: 2}] * 8
    assert dict(torch._dynamo.config.get_config_copy()) == config  # type: ignore[attr-defined]


def test_an_error_in_the_forward_leaves_a_working_model(make, tools):
    class Failing(make):
        failing = False

        def forward(self, x):
            y = super().forward(x)
            if self.failing:
                raise KeyError("the model's own")
            return y

    x = torch.randn(2, 8)
    for called_before in (True, False):
        model, _ = fxprec.convert(Failing())
        if called_before:
            model(x)
        model.failing = True
        for _ in range(2):
            with pytest.raises(KeyError, match="the model's own"):
                model(x)
            assert not torch.is_autocast_enabled("cpu")
        model.failing = False
        model(x)
        assert tools.matmul_dtypes(model, x) == {LOW: 2}
        assert len(fxprec.graphs(model)) >= 1  # not the net


# -- hooks, parametrizations, surgery


@pytest.mark.parametrize("place", ["", "up"])
@pytest.mark.parametrize("early", [True, False])
def test_hooks_of_every_kind(make, place, early, tools):
    model = make()
    seen = []

    def register():
        module = model.get_submodule(place)
        module.register_forward_pre_hook(lambda *_: seen.append("pre"))
        module.register_forward_pre_hook(lambda *_: seen.append("pre, keywords"), with_kwargs=True)
        module.register_forward_hook(lambda *_: seen.append("forward"))
        module.register_forward_hook(lambda *_: seen.append("forward, keywords"), with_kwargs=True)
        module.register_forward_hook(lambda *_: seen.append("forward, always"), always_call=True)
        module.register_full_backward_hook(lambda *_: seen.append("backward"))
        module.register_full_backward_pre_hook(lambda *_: seen.append("before backward"))
        model.up.weight.register_hook(lambda _: seen.append("gradient"))
        model.up.weight.register_post_accumulate_grad_hook(lambda _: seen.append("accumulated"))

    x = torch.randn(2, 8, requires_grad=True)
    if early:
        register()
        fxprec.convert(model)
    else:
        fxprec.convert(model)
        model(x)
        register()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            seen.clear()
            model(x).sum().backward()
            assert sorted(seen) == sorted(
                ["pre", "pre, keywords", "forward", "forward, keywords", "forward, always", "backward",
                 "before backward", "gradient", "accumulated"]
            )  # fmt: skip
    assert tools.matmul_dtypes(model, x) == {LOW: 2}
    reasons = "".join(conversion_of(model).net.values())  # dynamo leaves a submodule's backward hooks to autograd
    assert ("backwards hooks" in reasons) is (place == "up")


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize(
    "parametrization",
    [parametrizations.weight_norm, parametrizations.spectral_norm, parametrizations.orthogonal, nn.utils.spectral_norm],
)
@pytest.mark.filterwarnings("ignore:.*is deprecated")
def test_parametrized_weights(make, parametrization, early, tools):
    model = make()
    x = torch.randn(2, 8)
    if early:
        parametrization(model.up)
        fxprec.convert(model)
    else:
        fxprec.convert(model)
        model(x)
        parametrization(model.up)
    model(x).sum().backward()
    assert {parameter.grad.dtype for parameter in model.parameters()} == {torch.float32}
    assert torch.float32 not in tools.matmul_dtypes(model, x)
    assert LOW in tools.matmul_dtypes(model, x)


def test_pruned_weights(pair, tools):
    model, _ = pair
    x = torch.randn(2, 8)
    model(x)
    prune.l1_unstructured(model.up, "weight", 0.5)
    model(x).sum().backward()
    assert model.up.weight_orig.grad is not None
    assert tools.matmul_dtypes(model, x) == {LOW: 2}
    prune.remove(model.up, "weight")
    assert tools.matmul_dtypes(model, x) == {LOW: 2}


class Adapter(nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, 2, bias=False)
        self.up = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


def test_adapters_put_in_after_conversion(pair, tools):
    model, _ = pair
    x = torch.randn(2, 8)
    model(x).sum().backward()
    model.zero_grad()
    model.up = Adapter(model.up)
    reference = fxprec.revert(copy.deepcopy(model))
    close(model(x), reference(x))
    model(x).sum().backward()
    assert model.up.base.weight.grad is None and model.up.up.weight.grad is not None
    assert tools.matmul_dtypes(model, x) == {LOW: 4}
    model.up = nn.Sequential(model.up.base, nn.Identity())
    assert tools.matmul_dtypes(model, x) == {LOW: 2}
    model.down.bias = None
    model.down.weight = nn.Parameter(torch.zeros(8, 16))
    assert torch.equal(model(x), torch.zeros(2, 8))


def test_train_eval_and_rates_of_submodules(make, tools):
    model, _ = fxprec.convert(nn.Sequential(make(), nn.Dropout(0.5)))
    x = torch.randn(64, 8)
    for action, drops in (
        (lambda: model[1].eval(), False),
        (lambda: model[1].train(), True),
        (lambda: setattr(model[1], "p", 0.0), False),
    ):
        action()
        assert bool((model(x) == 0).any()) is drops
    assert tools.matmul_dtypes(model, x) == {LOW: 2}


def test_weights_frozen_and_unfrozen(pair):
    model, _ = pair
    x = torch.randn(2, 8)
    for frozen, trained in ((model.up, model.down), (model.down, model.up), (model.up, model.down)):
        frozen.requires_grad_(False)
        trained.requires_grad_(True)
        model.zero_grad()
        model(x).sum().backward()
        assert frozen.weight.grad is None and trained.weight.grad.abs().sum() > 0


def test_some_weights_that_are_low_already(tools):
    class Mixed(Static):
        def forward(self, x):
            return self.down(F.relu(self.up(x.to(LOW))).float())

    model = Mixed()
    model.up.to(LOW)
    fxprec.convert(model)
    x = torch.randn(2, 8)
    model(x).sum().backward()
    assert (model.up.weight.grad.dtype, model.down.weight.grad.dtype) == (LOW, torch.float32)
    assert tools.matmul_dtypes(model, x) == {LOW: 2}


def test_a_weight_shared_by_two_converted_models():
    one, other = Static(), Static()
    other.up.weight = one.up.weight
    references = copy.deepcopy((one, other))
    fxprec.convert(one)
    fxprec.convert(other)
    x = torch.randn(2, 8)
    for models in ((one, other), references):
        (models[0](x).sum() + models[1](x).sum()).backward()
    close(one.up.weight.grad, references[0].up.weight.grad)
    torch.optim.SGD(one.parameters(), lr=0.5).step()
    with torch.no_grad():
        close(other(x), fxprec.revert(copy.deepcopy(other))(x))


def test_models_made_on_meta(make, tools):
    with torch.device("meta"):
        model = make()
    fxprec.convert(model)
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    x = torch.randn(2, 8)
    model(x).sum().backward()
    assert tools.matmul_dtypes(model, x) == {LOW: 2}


# -- around


def test_replicas_of_data_parallel_run_in_the_net(pair, tools):
    model, reference = pair
    replica = model._replicate_for_data_parallel()
    replica.up, replica.down = model.up, model.down
    x = torch.randn(2, 8)
    close(replica(x), reference(x))
    assert tools.matmul_dtypes(replica, x) == {LOW: 2}
    assert "replica" in str(conversion_of(model).net)


def test_averaged_models_follow(pair, tools):
    model, _ = pair
    x = torch.randn(2, 8)
    averaged = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(3):
        optimizer.zero_grad()
        model(x).square().sum().backward()
        optimizer.step()
        averaged.update_parameters(model)
        with torch.no_grad():
            close(averaged(x), fxprec.revert(copy.deepcopy(averaged.module))(x))
    assert tools.matmul_dtypes(averaged, x) == {LOW: 2}


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_torch_compile_around_a_training_step(make, backend, tools):
    torch._dynamo.reset()
    model, _ = fxprec.convert(make())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(4, 8)

    @torch.compile(backend=backend)
    def step(x):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    losses = [step(x).item() for _ in range(8)]
    assert losses[-1] < losses[0]
    assert tools.matmul_dtypes(step, x) == {LOW: 2 + 3}
    model.compile(backend=backend)
    assert tools.matmul_dtypes(model, x) == {LOW: 2}


def test_torch_jit_trace(pair, tools):
    model, reference = pair
    x = torch.randn(2, 8)
    model(x)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced = torch.jit.trace(model, x)
    y = torch.randn(5, 8)
    close(traced(y), reference(y))
    assert tools.matmul_dtypes(traced, y) == {LOW: 2}
    with torch.no_grad():
        model.up.weight.zero_()
    assert torch.equal(traced(y), model(y))  # the weights are read, not baked


@pytest.mark.parametrize("capture", ["auto", "dynamo"])
@pytest.mark.filterwarnings("ignore:`torch.jit.trace")
def test_torch_jit_trace_prints_nothing(capture, capfd, recwarn):
    """Its check compares a second trace with the first: they agree, whether or not the model was captured before."""
    with log_records(level=logging.INFO) as records:
        for called in (False, True):
            model = fxprec.convert(
                nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)), dtype=LOW, capture=capture
            )[0].eval()
            if called:
                model(torch.randn(2, 8))
            torch.jit.trace(model, torch.randn(2, 8))
    assert not [text for each in recwarn if not (text := str(each.message)).startswith("`torch.jit.trace")]
    assert capfd.readouterr() == ("", "") and not records


def test_tracers_that_would_get_fp32_or_nothing_are_refused(pair):
    model, _ = pair
    model(torch.randn(2, 8))
    with pytest.raises(fxprec.ConversionError, match=r"fxprec\.graph_module"):
        torch.fx.symbolic_trace(model)
    with pytest.raises(fxprec.ConversionError, match=r"fxprec\.graph_module"):
        torch.fx.symbolic_trace(nn.Sequential(model, nn.ReLU()))
    with pytest.raises(fxprec.ConversionError, match="FP32"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.script(model)


def test_make_fx_and_fake_tensors(pair, tools):
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    model, reference = pair
    x = torch.randn(2, 8)
    model(x)
    traced = make_fx(model)(x)
    close(traced(x), reference(x))
    assert tools.matmul_dtypes(traced, x) == {LOW: 2}
    with FakeTensorMode(allow_non_fake_inputs=True):
        output = model(torch.randn(3, 8))
    assert (output.shape, output.dtype) == ((3, 8), torch.float32)
    model(x).sum().backward()
    assert tools.matmul_dtypes(model, x) == {LOW: 2}


def test_forward_called_directly_and_a_call_of_ones_own(make, tools):
    class Twice(make):
        def __call__(self, x, twice=False):
            y = super().__call__(x)
            return y * 2 if twice else y

    model, _ = fxprec.convert(Twice())
    x = torch.randn(2, 8)
    assert torch.equal(model(x, twice=True), model.forward(x) * 2)
    assert tools.matmul_dtypes(model.forward, x) == tools.matmul_dtypes(model, x, twice=True) == {LOW: 2}


def test_a_child_converted_after_its_parent(make, tools):
    model, _ = fxprec.convert(nn.Sequential(make(), nn.Linear(8, 8)))
    x = torch.randn(2, 8)
    model(x)
    fxprec.convert(model[0])
    assert tools.matmul_dtypes(model, x) == {LOW: 3}
    assert len(fxprec.graphs(model[0])) == 1


def test_inner_compile_of_the_users_gives_way(tools):
    class Compiled(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(8, 8)

        @torch.compile(backend="eager")
        def forward(self, x):
            return self.fc(x)

    model, _ = fxprec.convert(Compiled())
    x = torch.randn(2, 8)
    assert tools.matmul_dtypes(model, x) == {LOW: 1}
    assert len(fxprec.graphs(model)) == 1


def test_reentrant_and_other_checkpoints(tools):
    class Recomputed(nn.Module):
        def __init__(self, block, reentrant):
            super().__init__()
            self.block, self.reentrant = block, reentrant

        def forward(self, x):
            return checkpoint(self.block, x * 1, use_reentrant=self.reentrant)

    x = torch.randn(2, 8, requires_grad=True)
    for reentrant in (False, True):
        reference = Recomputed(Static(), reentrant)
        model, _ = fxprec.convert(copy.deepcopy(reference))
        for net in (reference, model):
            net(x).sum().backward()
        close(model.block.up.weight.grad, reference.block.up.weight.grad)
        assert tools.matmul_dtypes(lambda model=model: model(x).sum().backward()).keys() == {LOW}


# -- life and death


@pytest.mark.parametrize("kind", [Static, Dynamic, Broken])
@pytest.mark.parametrize("examples", [None, (torch.ones(2, 8),)], ids=["lazy", "examples"])
def test_a_dead_model_is_freed(kind, examples):
    model = kind()
    fxprec.convert(model, examples)
    model(torch.randn(2, 8)).sum().backward()
    model.eval()
    with torch.no_grad():
        model(torch.randn(3, 8))
    conversion = conversion_of(model)
    parameter = next(model.parameters())
    dead = [weakref.ref(thing) for thing in (model, parameter, conversion, conversion.captured[0].gm, conversion.store)]
    del model, parameter, conversion
    gc.collect()
    assert [reference() for reference in dead] == [None] * 5


@pytest.mark.parametrize("kind", [Static, Dynamic, Broken])
def test_revert_frees_the_graphs_and_gives_back_fp32(kind, tools):
    model = kind()
    x = torch.randn(2, 8)
    count = sum(isinstance(module, nn.Linear) for module in model.modules())
    for _ in range(2):
        fxprec.convert(model)
        assert tools.matmul_dtypes(model, x) == {LOW: count}
        graph = weakref.ref(fxprec.graphs(model)[-1])
        fxprec.revert(model)
        gc.collect()
        assert graph() is None
        assert type(model) is kind and "_fxprec" not in model.__dict__
        assert tools.matmul_dtypes(model, x) == {torch.float32: count}


@pytest.mark.slow
@pytest.mark.skipif(torch.__version__ < "2.13", reason="dynamo counts recompilations for each capture apart since 2.13")
def test_no_number_of_conversions_of_a_class_is_too_many(tools, monkeypatch):
    monkeypatch.setitem(dynamo._CONFIG, "recompile_limit", 2)  # type: ignore[arg-type]
    x = torch.randn(2, 8)
    for _ in range(6):
        model, _ = fxprec.convert(Broken())
        assert tools.matmul_dtypes(model, x) == {LOW: 4}
        assert len(fxprec.graphs(model)) == 2
