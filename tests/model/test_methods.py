"""Methods that were named are captured, run, reported and reverted as forward is."""

from __future__ import annotations

import copy
import functools
import gc
import inspect
import io
import pickle
import threading
import types
import warnings

import pytest
import torch
from torch import nn

import fxprec
from fxprec.model.conversion import conversion_of

LOW = torch.bfloat16


class Coder(nn.Module):
    """As a VAE: a forward that calls two methods, one with a default and a norm, one with a keyword."""

    def __init__(self):
        super().__init__()
        self.down, self.norm, self.up = nn.Linear(8, 6), nn.LayerNorm(6), nn.Linear(6, 8)
        self.drop = nn.Dropout(0.5)

    def encode(self, x, scale=1.0):
        """To latents."""
        return self.drop(torch.relu(self.norm(self.down(x)))) * scale

    def decode(self, z, *, shift=0.0):
        return self.up(z) + shift

    def forward(self, x):
        return self.decode(self.encode(x))


class Branchy(Coder):
    """Static capture cannot take its encode, and so neither its forward; dynamo breaks there."""

    def encode(self, x, scale=1.0):
        if x.sum() > 1e9:
            return x
        return super().encode(x, scale)


class Pipe(nn.Module):
    """A model whose submodules are used by themselves."""

    def __init__(self, kind=Coder):
        super().__init__()
        self.vae = kind()
        self.norm, self.head = nn.BatchNorm1d(8), nn.Linear(8, 8)

    def forward(self, x):
        return self.head(self.norm(self.vae.decode(self.vae.encode(x))))


ROOT = ("encode", "decode")
BELOW = ("vae.encode", "vae.decode", "norm", "vae")


def pair(kind, methods, capture="auto", **settings):
    """A converted model and the original, in eval mode."""
    torch.manual_seed(0)
    model = kind().eval()
    original = copy.deepcopy(model)
    return fxprec.convert(model, dtype=LOW, capture=capture, methods=methods, **settings).module, original


def found(model, method):
    """A bound method by its dotted name; a module is its own forward."""
    for part in method.split("."):
        model = getattr(model, part)
    return model


def gradients(model):
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def results(model, method, x, **kwargs):
    """Output and gradients of a call."""
    model.zero_grad()
    x = x.detach().requires_grad_()
    y = found(model, method)(x, **kwargs)
    (y.double() * torch.arange(y.numel()).reshape(y.shape).cos()).sum().backward()
    return {"output": y.detach(), "input": x.grad, **{k: v for k, v in gradients(model).items() if v is not None}}


def assert_as_good_as_autocast(model, original, method, x, **kwargs):
    """Output and gradients at most twice as far from float64 as eager autocast's, and FP32."""
    exact = results(copy.deepcopy(original).double(), method, x.double(), **kwargs)
    with torch.autocast("cpu", LOW):
        cast = results(original, method, x, **kwargs)
    got = results(model, method, x, **kwargs)
    assert got.keys() == exact.keys() and got["output"].dtype == torch.float32
    for name, value in exact.items():
        allowed = 2 * (cast[name] - value).abs().max() + 2.0**-8 * value.abs().max()
        assert (got[name] - value).abs().max() <= allowed, (method, name)


def captured(model):
    """The methods of the graphs that there are, sorted."""
    return sorted(each.method for each in conversion_of(model).captured)


CASES = [(kind, ROOT) for kind in (Coder, Branchy)] + [
    (lambda kind=kind: Pipe(kind), BELOW) for kind in (Coder, Branchy)
]
IDS = ["root", "root-breaks", "below", "below-breaks"]


@pytest.mark.parametrize("capture", ["auto", "dynamo"])
@pytest.mark.parametrize(("kind", "methods"), CASES, ids=IDS)
def test_each_method_computes_as_autocast_does(tools, kind, methods, capture):
    model, original = pair(kind, methods, capture)
    x = torch.randn(4, 8)
    inputs = {"decode": torch.randn(4, 6), "vae.decode": torch.randn(4, 6)}
    for method in (*methods, "__call__"):
        assert_as_good_as_autocast(model, original, method, inputs.get(method, x))
        heavy = tools.matmul_dtypes(found(model, method), inputs.get(method, x))
        assert heavy.keys() <= {LOW}, method
    assert {*captured(model)} == {"forward", *(str(conversion_of(model).method(m).key) for m in methods)}
    first = "vae.encode" if "vae" in methods else "encode"
    assert_as_good_as_autocast(model, original, first, x, scale=2.5)


@pytest.mark.parametrize("capture", ["auto", "dynamo"])
@pytest.mark.parametrize(("kind", "methods"), [CASES[0], CASES[2]], ids=["root", "below"])
def test_a_forward_that_calls_named_methods_is_one_graph(kind, methods, capture):
    model, _ = pair(kind, methods, capture)
    x = torch.randn(4, 8)
    for _ in range(3):
        model(x)
        found(model, methods[0])(x)
    assert captured(model).count("forward") == 1 and captured(model).count(methods[0]) == 1
    assert conversion_of(model).net == {}


def test_static_capture_takes_all_of_them_when_converting():
    model, _ = pair(Pipe, (*BELOW, "head"))
    expected = ["forward", "head.forward", "norm.forward", "vae.decode", "vae.encode", "vae.forward"]
    assert captured(model) == expected and len(fxprec.graphs(model)) == 6


def test_graph_module_of_a_method():
    model, _ = pair(Pipe, BELOW)
    x, z = torch.randn(4, 8), torch.randn(4, 6)
    assert torch.equal(fxprec.graph_module(model, method="vae.decode")(z), model.vae.decode(z))
    assert torch.equal(fxprec.graph_module(model, "norm")(x), model.norm(x))
    assert torch.equal(fxprec.graph_module(model)(x), model(x))
    with pytest.raises(ValueError, match=r"method='vae.dcode': Pipe was converted with forward.*did you mean 'vae.d"):
        fxprec.graph_module(model, "vae.dcode")


def test_a_method_that_waits_for_a_call_says_so():
    model, _ = pair(Branchy, ROOT)
    with pytest.raises(fxprec.NotCapturedError, match=r"Branchy.encode is captured at its first call \(encode: branch"):
        fxprec.graph_module(model, "encode")
    model.encode(torch.randn(2, 8))
    with pytest.raises(fxprec.SeveralGraphsError, match=r"Branchy\.encode has no graph .*pieces.*test_methods\.py:"):
        fxprec.graph_module(model, "encode")  # it branches on a value
    assert {"decode", "encode"} == {*captured(model)}  # graphs() gives what there is
    assert len(fxprec.graphs(model)) == len(captured(model))


def test_names_signatures_and_docstrings_stay():
    model, original = pair(Pipe, BELOW)
    assert type(model.vae).__name__ == "Coder" and isinstance(model.vae, Coder)
    assert type(model.vae).__module__ == Coder.__module__ and type(model.vae).__qualname__ == "Coder"
    for name in ("encode", "decode", "forward"):
        ours, theirs = getattr(model.vae, name), getattr(original.vae, name)
        assert inspect.signature(ours) == inspect.signature(theirs)
        assert (ours.__name__, ours.__doc__) == (theirs.__name__, theirs.__doc__)
    assert repr(model) == repr(original) and list(model.state_dict()) == list(original.state_dict())


def test_revert_gives_every_class_back():
    model, original = pair(Pipe, BELOW)
    x = torch.randn(4, 8)
    kept = model.vae.encode
    fxprec.revert(model)
    assert (type(model), type(model.vae), type(model.norm)) == (Pipe, Coder, nn.BatchNorm1d)
    assert torch.equal(model.vae.encode(x), original.vae.encode(x)) and torch.equal(kept(x), original.vae.encode(x))
    assert not any(name.startswith("_fxprec") for part in model.modules() for name in vars(part))


def test_original_runs_untouched_methods():
    model, original = pair(Pipe, BELOW)
    x = torch.randn(4, 8)
    with fxprec.original(model):
        assert torch.equal(model.vae.encode(x), original.vae.encode(x))
        assert torch.equal(model.norm(x), original.norm(x))
    assert not torch.equal(model.vae.encode(x), original.vae.encode(x))


def _saved(model):
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), _saved])
@pytest.mark.parametrize("capture", ["auto", "dynamo"])
def test_copies_convert_the_same_methods(copied, capture):
    model, _ = pair(Pipe, BELOW, capture)
    x = torch.randn(4, 8)
    expected = model.vae.encode(x)
    other = copied(model)
    assert other.vae is not model.vae and isinstance(other.vae, Coder) and type(other.vae) is not Coder
    assert torch.equal(other.vae.encode(x), expected)
    assert "vae.encode" in captured(other) and conversion_of(other) is not conversion_of(model)
    with torch.no_grad():
        other.vae.down.weight.zero_()
    assert not torch.equal(other.vae.encode(x), expected) and torch.equal(model.vae.encode(x), expected)


def test_a_part_is_copied_as_the_plain_original():
    model, original = pair(Pipe, BELOW)
    x = torch.randn(4, 8)
    for part in (copy.deepcopy(model.vae), pickle.loads(pickle.dumps(model.vae)), copy.copy(model.vae)):
        assert type(part) is Coder and torch.equal(part.encode(x), original.vae.encode(x))
    assert b"fxprec" not in pickle.dumps(model.vae)


def test_a_shallow_copy_shares_its_parts():
    model, _ = pair(Pipe, BELOW)
    x = torch.randn(4, 8)
    other = copy.copy(model)
    assert other.vae is model.vae and torch.equal(other(x), model(x))
    assert torch.equal(other.vae.encode(x), model.vae.encode(x))
    fxprec.revert(other)
    assert type(model.vae) is not Coder and torch.equal(other.vae.encode(x), model.vae.encode(x))


@pytest.mark.parametrize("capture", ["auto", "dynamo"])
def test_policy_patterns_and_module_paths_are_those_of_the_model(capture):
    policy = fxprec.Policy.preset("O1").override(modules={"vae.down": torch.float32})
    model, _ = pair(Pipe, BELOW, capture, policy=policy)
    model.vae.encode(torch.randn(4, 8))
    model(torch.randn(4, 8))
    fxprec.testing.assert_precision(model, "vae.down", torch.float32)
    gm = fxprec.graph_module(model, "vae.encode")
    assert any(node.target == "vae.down.weight" for node in gm.graph.find_nodes(op="get_attr"))
    whole = fxprec.Policy.preset("O1").override(modules={"vae": torch.float32})
    model, original = pair(Pipe, BELOW, capture, policy=whole)
    x, z = torch.randn(4, 8), torch.randn(4, 6)
    assert torch.equal(model.vae.encode(x, scale=3.0), original.vae.encode(x, scale=3.0))
    assert torch.equal(model.vae.decode(z), original.vae.decode(z))
    relu = next(n for n in fxprec.graph_module(model, "vae.encode").graph.nodes if "relu" in n.name)
    assert [*relu.meta["nn_module_stack"]] == ["vae"]


def test_an_override_may_match_a_method_that_is_captured_later():
    policy = fxprec.Policy.preset("O1").override(ops={"tanh": torch.float32})

    class Late(Coder):
        def decode(self, z):
            if z.sum() > 1e9:
                return z
            return torch.tanh(self.up(z))

        def forward(self, x):
            return self.encode(x)

    model, _ = pair(Late, ROOT, policy=policy)
    model(torch.randn(2, 8))
    model.decode(torch.randn(2, 6))
    nothing = fxprec.Policy.preset("O1").override(ops={"sigmoid": torch.float32})
    model, _ = pair(Late, ROOT, policy=nothing)
    model(torch.randn(2, 8))
    with pytest.raises(fxprec.PolicyError, match="the graph has no such op"):
        model.decode(torch.randn(2, 6))


def test_train_eval_and_no_grad_are_told_apart(tools):
    model, _ = pair(Coder, ROOT)
    x = torch.randn(64, 8)
    model.train()
    assert not torch.equal(model.encode(x), model.encode(x))
    model.eval()
    assert torch.equal(model.encode(x), model.encode(x))
    with torch.no_grad():
        assert not model.encode(x).requires_grad
    assert model.encode(x).requires_grad
    assert tools.matmul_dtypes(model.encode, x) == {LOW: 1}


def test_outputs_are_low_where_they_were_asked_for():
    model, _ = pair(Coder, ROOT, keep_output_dtype=False)
    assert model.decode(torch.randn(4, 6)).dtype == LOW
    x = torch.randn(4, 8, dtype=LOW)
    assert pair(Coder, ROOT)[0].encode(x).shape == (4, 6)


class Generator(Coder):
    """A loop that calls a method and the model itself."""

    @torch.no_grad()
    def generate(self, x, steps):
        z = self.encode(x)
        for _ in range(steps):
            x = self(self.decode(z))
            z = self.encode(x) + z
        return x


@pytest.mark.parametrize("capture", ["auto", "dynamo"])
@pytest.mark.parametrize("methods", [ROOT, (*ROOT, "generate")])
def test_a_loop_around_methods_runs_their_graphs(tools, capture, methods):
    model, original = pair(Generator, methods, capture)
    x = torch.randn(2, 8)
    with torch.autocast("cpu", LOW):
        expected = original.generate(x, 3)
    exact = copy.deepcopy(original).double().generate(x.double(), 3)
    got = model.generate(x, 3)
    assert (got - exact).abs().max() <= 2 * (expected - exact).abs().max() + 2.0**-8 * exact.abs().max()
    assert tools.matmul_dtypes(model.generate, x, 3).keys() == {LOW}
    count = len(captured(model))
    for steps in (3, 3):
        model.generate(x, steps)
    assert len(captured(model)) == count


def test_generators_run_in_the_net(tools):
    class Stream(Coder):
        def stream(self, x):
            for _ in range(2):
                x = self.up(self.down(x))
                yield x

    model, _ = pair(Stream, ("stream",))
    x = torch.randn(2, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fxprec.ServiceWarning)
        assert tools.matmul_dtypes(lambda: [y.dtype for y in model.stream(x)]) == {LOW: 4}
    assert [y.dtype for y in model.stream(x)] == [torch.float32] * 2
    assert "a generator" in conversion_of(model).net["the whole of stream"]


def test_threads_share_the_graphs():
    model, _ = pair(Pipe, BELOW, "dynamo")
    x = torch.randn(4, 8)
    outputs: list[torch.Tensor] = []
    errors: list[BaseException] = []

    def run():
        try:
            outputs.append(model.vae.encode(x) + model.vae.encode(model(x)))
        except BaseException as error:  # shown by the assertion below
            errors.append(error)

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors and all(torch.equal(outputs[0], other) for other in outputs[1:])


def test_an_outer_compile_keeps_our_graphs(tools):
    model, _ = pair(Coder, ROOT)
    x = torch.randn(4, 8)
    seen = []

    def backend(gm, inputs):
        seen.append([node.name for node in gm.graph.nodes])
        return gm.forward

    compiled = torch.compile(lambda x: model.encode(x * 2) + 1, backend=backend)
    expected = model.encode(x * 2) + 1
    assert torch.equal(compiled(x), expected) and not any("linear" in name for names in seen for name in names)
    assert tools.matmul_dtypes(compiled, x) == {LOW: 1}


def test_a_replica_runs_in_the_net(tools):
    model, _ = pair(Pipe, BELOW)
    x = torch.randn(4, 8)
    for part, call in ((model, "forward"), (model.vae, "encode")):
        replica = part._replicate_for_data_parallel()
        replica._parameters = dict(part._parameters)
        assert tools.matmul_dtypes(getattr(replica, call), x).keys() == {LOW}
        assert getattr(replica, call)(x).dtype == torch.float32
    assert "replica" in conversion_of(model).net["the whole of vae.encode"]


def test_a_model_that_is_gone_leaves_a_warning():
    model, original = pair(Pipe, BELOW)
    vae, x = model.vae, torch.randn(4, 8)
    del model
    gc.collect()
    with pytest.warns(fxprec.NotLoweredWarning, match="Coder runs in FP32: the converted model that ran its methods"):
        assert torch.equal(vae.encode(x), original.vae.encode(x))
    assert type(vae) is Coder
    vae = pair(Pipe, BELOW)[0].vae
    gc.collect()
    fxprec.convert(vae)  # it is free


def test_hooks_on_a_named_module_run():
    model, _ = pair(Pipe, ("vae", "norm"))
    seen = []
    model.vae.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    model.vae(torch.randn(4, 8))
    assert seen == [torch.float32]
    model(torch.randn(4, 8))  # which calls vae.encode and vae.decode
    assert seen == [torch.float32]


@pytest.mark.parametrize("capture", ["auto", "dynamo"])
def test_a_class_that_changes_is_followed(capture):
    class Changing(Coder):
        def encode(self, x):
            return self.down(x)

    model, _ = pair(lambda: Pipe(Changing), ("vae.encode",), capture)
    x = torch.randn(4, 8)
    model(x), model.vae.encode(x)
    Changing.encode = lambda self, x: self.down(x) * 100
    reference = fxprec.revert(copy.deepcopy(model))
    torch.testing.assert_close(model.vae.encode(x), reference.vae.encode(x), rtol=0.05, atol=1.0)
    torch.testing.assert_close(model(x), reference(x), rtol=0.05, atol=1.0)


def test_a_refused_first_call_puts_everything_back():
    policy = fxprec.Policy.preset("O1").override(ops={"sigmoid": torch.float32})
    torch.manual_seed(0)
    model = Pipe(Branchy)
    fxprec.convert(model, policy=policy, capture="dynamo", methods=("vae.encode",))
    model.vae.encode(torch.randn(4, 8))
    with pytest.raises(fxprec.PolicyError):
        model(torch.randn(4, 8))
    other = Pipe()
    with pytest.raises(fxprec.PolicyError):
        fxprec.convert(other, policy=policy, methods=("vae.encode",))
    assert type(other) is Pipe and type(other.vae) is Coder


def test_symbolic_capture_names_the_method():
    with pytest.raises(fxprec.CaptureError, match=r"cannot take Branchy.encode: branches on a traced value"):

        class Own(Branchy):
            def forward(self, x):
                return self.up(self.down(x))

        Own.__name__ = "Branchy"
        fxprec.convert(Own(), capture="symbolic", methods=("encode",))


def test_frozen_methods(tools):
    model, _ = pair(Pipe, BELOW)
    x = torch.randn(4, 8)
    expected = model.vae.encode(x)
    fxprec.freeze(model)
    assert torch.equal(model.vae.encode(x), expected) and model.vae.down.weight.dtype == LOW
    assert model.norm(x).dtype == torch.float32
    model.vae.train()
    with pytest.raises(fxprec.ConversionError, match="a training forward"):
        model.vae.encode(x)


def test_o3_methods_give_the_dtypes_of_the_original():
    model, _ = pair(Pipe, BELOW, level="O3")
    assert model.vae.encode(torch.randn(4, 8)).dtype == torch.float32
    fxprec.revert(model)


def test_training_through_methods_follows_fp32():
    model, original = pair(Pipe, BELOW)
    losses = []
    for each in (model, original):
        each.train()
        each.vae.drop.p = 0.0
        optimizer = torch.optim.SGD(each.parameters(), lr=0.05)
        torch.manual_seed(1)
        for _ in range(5):
            x = torch.randn(8, 8)
            optimizer.zero_grad()
            z = each.vae.encode(x)
            loss = (each.vae.decode(z) - x).square().mean() + each(x).square().mean()
            loss.backward()
            optimizer.step()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=0.02) and losses[0] != losses[1]


def test_a_wrapper_that_takes_over_attributes_is_no_function_of_ours() -> None:
    """``functools.wraps`` copies what is noted on a function, and so what would make it ours."""
    model = nn.Sequential(nn.Linear(8, 8))
    x = torch.randn(4, 8)
    fxprec.convert(model, dtype=torch.bfloat16)
    expected = model(x)
    plain = model.forward
    model.forward = functools.wraps(plain)(lambda x: plain(x) * 2)
    torch.testing.assert_close(model(x), expected * 2)
    inner = model.forward  # ours, in the place of the function that was set
    model.forward = functools.wraps(inner)(lambda x: inner(x) * 3)
    torch.testing.assert_close(model(x), expected * 6)
    torch.testing.assert_close(copy.deepcopy(model)(x), expected * 6)
    model.forward = types.MethodType(
        functools.wraps(plain.__func__)(lambda self, x: plain.__func__(self, x) * 4), model
    )
    torch.testing.assert_close(model(x), expected * 4)
    fxprec.revert(model)
    torch.testing.assert_close(model(x), expected * 4, atol=0.05, rtol=0.05)


def _doubled(inner, self, x):
    return inner(self, x) * 2


def test_a_bound_method_on_the_instance_stays_one_and_can_be_wrapped_again():
    """As Accelerate does: it takes the ``__func__`` of what it finds there, wraps that and binds it, twice."""
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    x = torch.randn(2, 4)
    model, _ = fxprec.convert(model)
    plain = model(x)
    for _ in range(2):
        inner = model.forward.__func__
        model.forward = types.MethodType(functools.partial(_doubled, inner), model)
        model.forward = types.MethodType(lambda self, x, inner=model.forward.__func__: inner(self, x), model)
    assert model.forward.__self__ is model and [*inspect.signature(model.forward).parameters] == ["x", "inner"]
    for _ in range(2):  # the first call of a function that was just set runs in the net
        torch.testing.assert_close(model(x), plain * 4, rtol=0.01, atol=0.01)
    fxprec.revert(model)
    torch.testing.assert_close(model(x), plain * 4, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("wrap", [torch.autocast("cpu"), lambda f: functools.partial(torch.autocast("cpu")(f))])
def test_a_function_that_enters_autocast_is_told(late, wrap):
    model = nn.Linear(4, 4)
    if late:
        fxprec.convert(model)
    with pytest.warns(fxprec.UnusedSettingWarning, match="wrapped in torch.autocast"):
        model.forward = wrap(model.forward)
        if not late:
            fxprec.convert(model)
