"""convert: what goes in and comes out, and every input that it refuses, leaving the model as it was."""

from __future__ import annotations

import copy
import io
import math
import sys
import warnings
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxprec
from fxprec.kernels.cpu import processor


def mlp():
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


class Branchy(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x):
        if x.sum() > 0:
            x = x + 1
        return self.fc(x)


@pytest.fixture
def unchanged():
    """Check after the test that the model is what it was."""
    seen = []

    def watch(model):
        if isinstance(model, nn.Module):
            seen.append(
                (model, type(model), {k: v.clone() for k, v in model.state_dict().items()}, dict(model.__dict__))
            )
        return model

    yield watch
    for model, kind, state, attributes in seen:
        assert type(model) is kind
        assert model.__dict__.keys() == attributes.keys()
        for name, value in model.state_dict().items():
            assert torch.equal(value, state[name])


# -- what comes out


def test_the_same_object_comes_back_and_outputs_stay_fp32(tools):
    model = mlp()
    parameters = dict(model.named_parameters())
    keys = list(model.state_dict())
    converted, scaler = fxprec.convert(model)
    assert converted is model
    assert isinstance(converted, nn.Sequential)
    assert isinstance(scaler, torch.amp.GradScaler) and not scaler.is_enabled()
    x = torch.randn(3, 8)
    out = converted(x)
    assert out.dtype is torch.float32
    assert tools.matmul_dtypes(converted, x) == {torch.bfloat16: 2}
    assert list(converted.state_dict()) == keys
    assert all(p is parameters[name] for name, p in converted.named_parameters())


def test_o0_is_equal_bit_for_bit(tools):
    model = mlp()
    x = torch.randn(3, 8)
    expected = model(x)
    for capture in ("auto", "dynamo"):
        converted, scaler = fxprec.convert(copy.deepcopy(model), level="O0", capture=capture)
        assert torch.equal(converted(x), expected)
        assert not scaler.is_enabled()


def test_o0_of_a_low_input_is_low():
    module, _ = fxprec.convert(lambda x: (x * 3).exp(), level="O0")
    x = torch.randn(3, dtype=torch.bfloat16)
    assert torch.equal(module(x), (x * 3).exp())


def test_o3_makes_the_parameters_low(tools):
    converted, _ = fxprec.convert(mlp(), level="O3")
    x = torch.randn(3, 8)
    assert {p.dtype for p in converted.parameters()} == {torch.bfloat16}
    assert converted(x).dtype is torch.float32
    converted(x).sum().backward()
    assert {p.grad.dtype for p in converted.parameters()} == {torch.bfloat16}


def test_float16_on_a_cpu_warns_once_that_it_is_slow():
    sys.modules["fxprec.convert"]._warn_slow.cache_clear()
    with pytest.warns(UserWarning, match="float16 on a CPU"):
        converted, scaler = fxprec.convert(nn.Linear(2, 2), dtype=torch.float16)
    assert scaler.is_enabled()
    loss = converted(torch.randn(1, 2)).sum() / 64
    scaler.scale(loss).backward()
    assert torch.isfinite(converted.weight.grad).all()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fxprec.convert(nn.Linear(2, 2), dtype=torch.float16)


@pytest.fixture
def cpu(monkeypatch):
    """``cpu(*flags)``: a CPU with these instruction sets, in a process that has warned of nothing."""
    module = sys.modules["fxprec.convert"]
    module._warn_slow.cache_clear()

    def pretend(*flags):
        for each in (sys.modules["fxprec.settings"], processor):
            monkeypatch.setattr(each, "cpu_flags", lambda: frozenset(flags))

    yield pretend
    module._warn_slow.cache_clear()


def test_bfloat16_on_a_cpu_without_units_warns_once_and_names_what_helps(cpu):
    cpu("avx2", "fma")
    with pytest.warns(fxprec.SlowDtypeWarning, match=r"no bfloat16 units") as caught:
        fxprec.convert(nn.Linear(2, 2))
    (warning,) = caught
    assert 'lower="pays"' in str(warning.message)
    assert warning.filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error", fxprec.SlowDtypeWarning)
        fxprec.convert(nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("flags", "settings"),
    [
        (["avx2", "avx512_bf16"], {}),
        (["avx2", "amx_bf16"], {}),
        (["asimd", "bf16"], {}),
        (["sve", "svebf16"], {}),
        ([], {}),  # nobody knows
        (["avx2"], {"level": "O0"}),
        (["avx2"], {"lower": "pays", "example_inputs": (torch.ones(1, 2),)}),
    ],
)
def test_it_does_not_warn_where_there_are_units_or_nothing_is_lost(cpu, flags, settings):
    cpu(*flags)
    with warnings.catch_warnings():
        warnings.simplefilter("error", fxprec.SlowDtypeWarning)
        fxprec.convert(nn.Linear(2, 2), dtype=torch.bfloat16, **settings)


def test_what_a_cpu_can_is_asked_of_torch_and_of_the_system(monkeypatch):
    monkeypatch.setattr(processor, "cpuinfo", {"Features": "fp asimd bf16", "flags": ""}.__getitem__)
    told = {"sve_bf16": True, "amx_bf16": False, "cores": 2}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: told, raising=False)  # new in torch 2.11
    assert processor.cpu_flags.__wrapped__() == {"fp", "asimd", "bf16", "sve_bf16"}


def test_a_function_gives_a_new_module(tools):
    def f(x, w, scale=2.0):
        return F.linear(x, w) * scale

    module, _ = fxprec.convert(f)
    x, w = torch.randn(3, 4), torch.randn(5, 4)
    assert torch.allclose(module(x, w), f(x, w), atol=0.1)
    assert torch.allclose(module(x, w, scale=3.0), f(x, w, 3.0), atol=0.2)
    assert tools.matmul_dtypes(module, x, w) == {torch.bfloat16: 1}


def test_a_graph_module_gives_a_new_module(tools):
    gm = torch.fx.symbolic_trace(mlp())
    text = str(gm.graph)
    module, _ = fxprec.convert(gm)
    assert module is not gm and str(gm.graph) == text
    x = torch.randn(3, 8)
    assert tools.matmul_dtypes(module, x) == {torch.bfloat16: 2}
    assert {id(p) for p in module.parameters()} == {id(p) for p in gm.parameters()}
    assert torch.allclose(module(x), gm(x), atol=0.05)


def test_an_exported_program_gives_a_new_module(tools):
    x = torch.randn(3, 8)
    model = mlp()
    exported = torch.export.export(model, (x,))
    module, _ = fxprec.convert(exported)
    assert torch.allclose(module(x), model(x), atol=0.05)
    assert tools.matmul_dtypes(module, x) == {torch.bfloat16: 2}


def test_loss_makes_one_graph_of_model_and_loss(tools):
    model = mlp()
    x, y = torch.randn(3, 8), torch.tensor([0, 1, 2])
    module, _ = fxprec.convert(model, (x, y), loss=nn.CrossEntropyLoss())
    expected = F.cross_entropy(model(x), y)
    loss = module(x, y)
    assert loss.shape == () and loss.dtype is torch.float32
    assert loss.item() == pytest.approx(expected.item(), rel=0.02)
    assert "cross_entropy" in {
        node.meta["op"].name for node in fxprec.graph_module(module).graph.nodes if "op" in node.meta
    }
    assert tools.matmul_dtypes(module, x, y) == {torch.bfloat16: 2}
    assert tools.matmul_dtypes(model, x) == {torch.float32: 2}  # the model itself stays as it was


@dataclass
class Out:
    logits: torch.Tensor
    hidden: torch.Tensor | None = None


class Odd(nn.Module):
    """Returns what people return besides tensors."""

    def __init__(self, kind):
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.kind = kind

    def forward(self, x):
        y = self.fc(x)
        if self.kind == "dataclass":
            return Out(y)
        if self.kind == "dict":
            return {"y": y, "none": None, "n": 3, "name": "a"}
        if self.kind == "tuple":
            return y, None, (y.argmax(-1), [y])
        return None


@pytest.mark.parametrize("kind", ["dataclass", "dict", "tuple", "none"])
@pytest.mark.parametrize("capture", ["auto", "dynamo"])
def test_outputs_that_are_no_tensors(kind, capture):
    model = Odd(kind)
    x = torch.randn(3, 8)
    expected = model(x)
    converted, _ = fxprec.convert(model, capture=capture) if kind != "none" else fxprec.convert(model)
    out = converted(x)
    assert type(out) is type(expected)
    if kind == "dataclass":
        assert out.hidden is None and out.logits.dtype is torch.float32
        assert torch.allclose(out.logits, expected.logits, atol=0.05)
    if kind == "dict":
        assert out.keys() == expected.keys() and out["none"] is None and out["n"] == 3 and out["name"] == "a"
    if kind == "tuple":
        assert out[1] is None and out[2][0].dtype is torch.int64 and isinstance(out[2][1], list)


def test_example_inputs_leave_no_trace():
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.5))
    state = {k: v.clone() for k, v in model.state_dict().items()}
    rng = torch.get_rng_state()
    for capture in ("auto", "dynamo"):
        converted, _ = fxprec.convert(copy.deepcopy(model), (torch.randn(2, 1, 8, 8, generator=torch.Generator()),),
                                      capture=capture)  # fmt: skip
        assert all(torch.equal(v, state[k]) for k, v in converted.state_dict().items())
        assert torch.equal(torch.get_rng_state(), rng)
        assert all(p.grad is None for p in converted.parameters())
        assert len(converted.graph.nodes) > 3


def test_keyword_example_inputs():
    converted, _ = fxprec.convert(mlp(), {"input": torch.randn(3, 8)})
    assert len(fxprec.graphs(converted)) == 1


def test_revert_and_original():
    model = mlp()
    x = torch.randn(3, 8)
    expected = model(x)
    converted, _ = fxprec.convert(model)
    assert not torch.equal(converted(x), expected)
    with fxprec.original(converted):
        assert torch.equal(converted(x), expected)
    assert not torch.equal(converted(x), expected)
    fxprec.revert(converted)
    assert type(model) is nn.Sequential
    assert torch.equal(model(x), expected)
    fxprec.convert(model)  # and again


# -- what is refused

O1 = fxprec.Policy.preset("O1")


@pytest.mark.parametrize(
    ("arguments", "kind", "words"),
    [
        ({"level": "01"}, ValueError, "O1"),
        ({"level": "O7"}, ValueError, "O0"),
        ({"dtype": torch.float32}, ValueError, "bfloat16"),
        ({"dtype": torch.int8}, ValueError, "bfloat16"),
        ({"placement": "mincat"}, ValueError, "did you mean 'mincut'"),
        ({"capture": "dynmo"}, ValueError, "did you mean 'dynamo'"),
        ({"executor": "inducter"}, ValueError, "did you mean 'inductor'"),
        ({"lower": "often"}, ValueError, "always"),
        ({"fuse": "yes"}, ValueError, "auto"),
        ({"level": "O2", "policy": fxprec.Policy.preset("O1")}, ValueError, "carries its level"),
        ({"policy": "O1"}, TypeError, "Policy.preset"),
        ({"scaler": "big"}, TypeError, "LossScaler"),
        ({"fuse": True, "dtype": torch.float16}, fxprec.ConversionError, "fuse='auto'"),
        ({"policy": O1.override(modules={"encodr": torch.float32})}, fxprec.PolicyError, "encodr"),
        ({"policy": O1.override(ops={"conv2d": torch.float32})}, fxprec.PolicyError, "conv2d"),
        ({"policy": O1.override(nodes={"linaer": torch.float32})}, fxprec.PolicyError, "linear"),
        ({"example_inputs": torch.randn(2, 8)}, TypeError, "(x,)"),
        ({"example_inputs": (torch.randn(2, 8), torch.randn(2))}, TypeError, "too many positional"),
        ({"example_inputs": {"inptu": torch.randn(2, 8)}}, TypeError, "inptu"),
        ({"example_inputs": (torch.randn(2, 9),)}, ValueError, "(2, 9)"),
        ({"example_inputs": (torch.randn(2, 8, device="meta"),)}, ValueError, "meta"),
        ({"loss": 3}, TypeError, "loss"),
    ],
)  # fmt: skip
def test_bad_arguments(arguments, kind, words, unchanged):
    model = unchanged(mlp())
    with pytest.raises(kind) as error:
        fxprec.convert(model, **arguments)
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("model", "kind", "words"),
    [
        (3, TypeError, "int"),
        ("model", TypeError, "str"),
        (nn.Linear, TypeError, "make an object of it"),
        (nn.Linear(2, 2).to(torch.bfloat16), fxprec.ConversionError, "Load the model in FP32"),
        (nn.Linear(2, 2).double(), fxprec.ConversionError, "float64"),
        (nn.Linear(2, 2).to(torch.complex64), fxprec.ConversionError, "complex64"),
        (nn.DataParallel(nn.Linear(2, 2)), fxprec.ConversionError, "convert first, then wrap"),
        (torch.compile(nn.Linear(2, 2)), fxprec.ConversionError, "_orig_mod"),
        (torch.jit.script(nn.Linear(2, 2)), fxprec.ConversionError, "TorchScript"),
    ],
)
def test_bad_models(model, kind, words, unchanged):
    unchanged(model)
    with pytest.raises(kind) as error:
        fxprec.convert(model)
    assert words in str(error.value)


def test_converting_twice(unchanged):
    converted, _ = fxprec.convert(mlp())
    unchanged(converted)
    with pytest.raises(fxprec.ConversionError, match="revert"):
        fxprec.convert(converted)
    outer = nn.Sequential(converted)
    with pytest.raises(fxprec.ConversionError, match="submodule '0'"):
        fxprec.convert(outer)


def test_under_an_outer_autocast(unchanged):
    model = unchanged(mlp())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with pytest.raises(fxprec.ConversionError, match="autocast"):
            fxprec.convert(model)


def test_calling_under_autocast_warns_once(tools):
    for capture in ("symbolic", "dynamo"):
        converted, _ = fxprec.convert(mlp(), capture=capture)
        x = torch.randn(3, 8)
        expected = converted(x)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            with pytest.warns(UserWarning, match="autocast"):
                assert torch.equal(converted(x), expected)
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                converted(x)


def test_data_dependent_control_flow_names_the_line(unchanged):
    model = unchanged(Branchy())
    with pytest.raises(fxprec.CaptureError, match=r"test_convert.py:\d+") as error:
        fxprec.convert(model, capture="symbolic")
    assert "dynamo" in str(error.value)


def test_data_dependent_control_flow_works_through_dynamo(tools):
    model = Branchy()
    x = torch.randn(3, 8).abs()
    expected = model(x), model(-x)
    converted, _ = fxprec.convert(model)
    assert torch.allclose(converted(x), expected[0], atol=0.05)
    assert torch.allclose(converted(-x), expected[1], atol=0.05)
    assert tools.matmul_dtypes(converted, x) == {torch.bfloat16: 1}


def test_a_lazy_policy_that_matches_nothing_is_refused_at_the_first_call(unchanged):
    model = unchanged(Branchy())
    policy = O1.override(ops={"conv2d": torch.float32})
    converted, _ = fxprec.convert(model, policy=policy)
    with pytest.raises(fxprec.PolicyError, match="conv2d"):
        converted(torch.randn(3, 8))
    assert type(model) is Branchy


def test_inspecting_what_is_not_converted():
    for inspect in (fxprec.graph_module, fxprec.graphs, fxprec.report, fxprec.revert, fxprec.refresh, fxprec.freeze):
        with pytest.raises(fxprec.ConversionError, match=r"fxprec\.convert"):
            inspect(mlp())


# -- deployment


def test_freeze_halves_the_weights_and_refuses_training():
    for capture in ("auto", "dynamo"):
        model = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 64))
        converted, _ = fxprec.convert(model, capture=capture)
        x = torch.randn(3, 64)
        converted.eval()
        with torch.inference_mode():
            expected = converted(x)
            before = sum(p.numel() * p.element_size() for p in converted.parameters())
            fxprec.freeze(converted)
            after = sum(p.numel() * p.element_size() for p in converted.parameters())
            assert torch.equal(converted(x), expected)
        assert after < 0.52 * before
        assert converted[1].weight.dtype is torch.float32
        with pytest.raises(fxprec.ConversionError, match="frozen"):
            converted.load_state_dict(converted.state_dict())
        converted.train()
        with pytest.raises(fxprec.ConversionError, match="frozen"):
            converted(x)
        with pytest.raises(fxprec.ConversionError, match="frozen"):
            fxprec.freeze(converted)
        converted.eval()
        assert torch.equal(converted(x), expected)


def test_taking_what_convert_returns_for_the_model_says_so():
    both = fxprec.convert(nn.Linear(2, 2))
    with pytest.raises(AttributeError, match=r"returns two things.*'parameters'"):
        both.parameters()
    with pytest.raises(TypeError, match="returns two things"):
        both(torch.ones(1, 2))
    model, scaler = both
    assert (both.module, both.scaler) == (model, scaler)


@pytest.mark.parametrize(
    ("argument", "words"), [("O1", "write level='O1'"), (torch.optim.SGD([torch.ones(1)], 0.1), "takes no optimizer")]
)
def test_what_is_no_example_input(argument, words):
    with pytest.raises(TypeError, match=words):
        fxprec.convert(nn.Linear(2, 2), argument)


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.body(x))


@pytest.mark.parametrize(
    ("overrides", "wide"),
    [
        ({"body.1": torch.float32}, {"body.1"}),
        ({nn.LayerNorm: "full"}, {"body.1"}),
        ({"body": "keep"}, {"body.0", "body.1"}),
        ({"body": torch.float32, "body.1": "low"}, {"body.0"}),
        ({"Sequential": torch.float32}, {"body.0", "body.1"}),
    ],
)
def test_level_o3_leaves_the_parameters_of_modules_that_stay_in_fp32(overrides, wide):
    model = Normed()
    exact = {name: p.detach().clone() for name, p in model.named_parameters()}
    fxprec.convert(model, policy=fxprec.Policy.preset("O3").override(modules=overrides))
    for name, parameter in model.named_parameters():
        dtype = torch.float32 if name.rpartition(".")[0] in wide else torch.bfloat16
        assert torch.equal(parameter, exact[name].to(dtype)) and parameter.dtype is dtype
    model(torch.randn(3, 4)).sum().backward()
    fxprec.revert(model)


def test_model_and_loss_are_captured_statically_where_the_arguments_have_names():
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    around, _ = fxprec.convert(model, loss=F.cross_entropy)
    assert [node.target for node in around.graph.find_nodes(op="placeholder")] == ["input", "target"]  # no call yet
    x, y = torch.randn(5, 4), torch.randint(3, (5,))
    right = around(x, y)
    buffer = io.BytesIO()
    torch.save(around, buffer)
    buffer.seek(0)
    for copied in (copy.deepcopy(around), torch.load(buffer, weights_only=False)):
        assert torch.equal(copied(x, y), right)
        copied.model[2].weight.data.zero_()
        copied.model[2].bias.data.zero_()
        assert copied(x, y).item() == pytest.approx(math.log(3))  # it reads its own weights
    assert torch.equal(around(x, y), right)


@pytest.mark.parametrize("capture", ["auto", "dynamo"])
def test_model_and_loss_take_keywords_however_they_are_captured(capture):
    around, _ = fxprec.convert(nn.Linear(4, 3), loss=F.cross_entropy, capture=capture)
    x, y = torch.randn(5, 4), torch.randint(3, (5,))
    right = around(x, y)
    assert torch.equal(around(x, target=y), right) and torch.equal(around(target=y, input=x), right)
    with fxprec.original(around):
        assert torch.equal(around(x, target=y), around(x, y))
    with pytest.raises(TypeError, match="missing a required argument"):
        around(x, label=y)
    assert not fxprec.report(around).headline.breaks


def test_model_and_loss_may_be_replaced_after_the_conversion():
    around, _ = fxprec.convert(nn.Linear(4, 3), loss=nn.CrossEntropyLoss())
    x, y = torch.randn(5, 4), torch.randint(3, (5,))
    mean = around(x, y)
    around.loss = nn.CrossEntropyLoss(reduction="sum")
    assert around(x, y).item() == pytest.approx(5 * mean.item(), rel=1e-5)
    around.model = nn.Linear(4, 3)
    nn.init.zeros_(around.model.weight)
    nn.init.zeros_(around.model.bias)
    for module in (around, fxprec.revert(around)):
        assert module(x, y).item() == pytest.approx(5 * math.log(3))


def test_an_exported_program_with_a_loss():
    x, y = torch.randn(5, 4), torch.randint(3, (5,))
    model = nn.Linear(4, 3)
    around, _ = fxprec.convert(torch.export.export(model, (x,)), loss=F.cross_entropy)
    assert around(x, y).item() == pytest.approx(F.cross_entropy(model(x), y).item(), rel=0.02)


class WithOption(nn.Linear):
    def forward(self, input, scale=None):
        output = super().forward(input)
        return output if scale is None else output * scale


def test_model_and_loss_take_a_call_where_an_argument_may_be_left_out():
    around, _ = fxprec.convert(WithOption(4, 3), loss=F.cross_entropy)
    x, y = torch.randn(5, 4), torch.randint(3, (5,))
    scaled = around(x, torch.zeros(()), y)
    assert scaled.item() == pytest.approx(math.log(3))
    assert not torch.equal(around(x, y), scaled)
