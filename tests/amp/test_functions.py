"""Decorated functions run in their precision: in a converted model's graphs, between them, and outside of models."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import fxprec
from fxprec import amp
from fxprec.amp._amp_state import AmpState, state
from fxprec.model.conversion import conversion_of

BF16, F32 = torch.bfloat16, torch.float32


@pytest.fixture(autouse=True)
def _fresh_state():
    before = dict(vars(state))
    vars(state).update(vars(AmpState()))
    yield
    vars(state).update(before)


@amp.float_function
def float_product(a, b):
    return a @ b


@amp.half_function
def half_product(a, b):
    return a @ b


@amp.promote_function
def promoted_dtypes(a, b):
    SEEN.append((a.dtype, b.dtype))
    return a + b


@amp.half_function
def half_exp(a):
    return torch.exp(a)


@amp.float_function
def outer_float(a, b):
    return half_product(a, b).float() + a @ b


SEEN: list = []


class Model(nn.Module):
    """Two linears around a function of an activation and a weight."""

    def __init__(self, function, breaks=False):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.weight = nn.Parameter(torch.randn(8, 8))
        self.function, self.breaks = function, breaks

    def forward(self, x):
        x = self.linear(x)
        if self.breaks:
            torch._dynamo.graph_break()
        x = self.function(x, self.weight)
        if self.breaks:
            torch._dynamo.graph_break()
        return self.linear(x)


def started(model, **options):
    return amp.initialize(model, **{"verbosity": 0, **options})


def x():
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("breaks", [False, True])
@pytest.mark.parametrize("opt_level", ["O1", "O2"])
@pytest.mark.parametrize(
    "function, expected", [(float_product, {BF16: 2, F32: 1}), (half_product, {BF16: 3})], ids=["float", "half"]
)
def test_matmuls_of_a_decorated_function_run_in_its_dtype(function, expected, opt_level, breaks, tools):
    model = started(Model(function, breaks), opt_level=opt_level)
    model(x())
    assert tools.matmul_dtypes(model, x()) == expected
    assert bool(conversion_of(model).net) == breaks
    out = model(x())
    out.sum().backward()
    assert out.dtype is F32 and model.weight.grad.dtype is F32


def test_a_float_function_computes_with_fp32_values_of_the_weights():
    model = started(Model(float_product))
    with torch.no_grad():
        model.linear.weight.copy_(torch.eye(8))
        model.linear.bias.zero_()
        a = x().bfloat16()
        assert torch.equal(model(x()), (a.float() @ model.weight).bfloat16().float())
        assert not torch.equal(model(x()), (a @ model.weight.bfloat16()).float())


def test_half_functions_lower_what_would_stay_fp32(tools):
    class Exp(nn.Module):
        def __init__(self, function):
            super().__init__()
            self.linear, self.function = nn.Linear(8, 8), function

        def forward(self, x):
            return self.linear(self.function(x))

    plain, low = started(Exp(torch.exp)), started(Exp(half_exp))
    for model in (plain, low):
        model(x())
    fxprec.testing.assert_precision(plain, "op:exp", F32)
    (exp,) = fxprec.graph_module(low).graph.find_nodes(op="call_function", target=torch.exp)
    assert exp.meta["precision"].output is BF16


def test_a_decorated_forward_of_a_submodule(tools):
    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)

        @amp.float_function
        def forward(self, x):
            return self.linear(x)

    model = started(nn.Sequential(nn.Linear(8, 8), Inner(), nn.Linear(8, 8)))
    model(x())
    assert tools.matmul_dtypes(model, x()) == {BF16: 2, F32: 1}


def test_decorated_functions_nest(tools):
    model = started(Model(outer_float))
    model(x())
    assert tools.matmul_dtypes(model, x()) == {BF16: 3, F32: 1}


def test_outside_of_models_they_cast_too(tools):
    started(nn.Linear(8, 8))
    a, b = x(), x().T.bfloat16()
    assert float_product(a, b).dtype is F32 and half_product(a, b).dtype is BF16
    assert half_product(a=a, b=b).dtype is BF16
    SEEN.clear()
    promoted_dtypes(a, b.T)
    promoted_dtypes(b, b)
    promoted_dtypes(a, torch.arange(8))
    assert SEEN == [(F32, F32), (BF16, BF16), (F32, torch.int64)]


@pytest.mark.slow
@pytest.mark.parametrize("breaks", [False, True])
def test_promoting_functions_get_arguments_of_one_dtype_in_a_model(breaks):
    """An op without a row; between graph breaks it would get a low activation and an FP32 weight."""
    with torch.library._scoped_library("fxprec_promotes", "FRAGMENT") as library:
        library.define("blend(Tensor a, Tensor b) -> Tensor")

        def blend(a, b):
            assert a.dtype == b.dtype, (a.dtype, b.dtype)
            return a * 0.5 + b

        library.impl("blend", blend, "CompositeExplicitAutograd")
        torch.library.register_fake("fxprec_promotes::blend", torch.empty_like, lib=library)
        op = torch.ops.fxprec_promotes.blend.default
        model = started(Model(amp.promote_function(lambda a, b: op(a, b[:4])), breaks))
        with torch.no_grad():
            assert model(x()).dtype is F32


def test_they_do_nothing_before_initialize_or_where_nothing_is_lowered():
    a, b = x(), x().T
    assert half_product(a, b).dtype is F32
    for options in ({"enabled": False}, {"opt_level": "O0"}, {"patch_torch_functions": False}, {"opt_level": "O3"}):
        started(nn.Linear(8, 8))
        assert half_product(a, b).dtype is BF16
        started(nn.Linear(8, 8), **options)
        assert half_product(a, b).dtype is F32


def test_a_decorated_function_keeps_its_name_and_text():
    @amp.float_function
    def documented(a):
        """What it does."""
        return a

    assert (documented.__name__, documented.__doc__) == ("documented", "What it does.")


def test_disable_casts_runs_models_in_their_own_dtypes(tools):
    model = started(Model(half_product))
    plain = fxprec.revert(copy.deepcopy(model))
    model(x())
    with amp.disable_casts():
        assert tools.matmul_dtypes(model, x()) == {F32: 3}
        assert torch.equal(model(x()), plain.linear(plain.linear(x()) @ plain.weight))
        assert half_product(x(), x().T).dtype is F32
        with amp.disable_casts():
            pass
        assert half_product(x(), x().T).dtype is F32
    assert tools.matmul_dtypes(model, x()) == {BF16: 3}
    assert half_product(x(), x().T).dtype is BF16


@pytest.mark.parametrize("breaks", [False, True])
def test_disable_casts_within_a_forward_is_a_region_in_fp32(breaks, tools):
    class Region(Model):
        def forward(self, x):
            x = self.linear(x)
            with amp.disable_casts():
                x = half_product(x.float(), self.weight)
            if self.breaks:
                torch._dynamo.graph_break()
            return self.linear(x)

    model = started(Region(None, breaks))
    for _ in range(2):
        model(x())
    assert tools.matmul_dtypes(model, x()) == {BF16: 2, F32: 1}
    assert state.disabled == 0 and conversion_of(model).bypassed == 0


def test_disable_casts_ends_with_an_exception():
    model = started(nn.Linear(8, 8))
    with pytest.raises(KeyError), amp.disable_casts():
        raise KeyError
    assert state.disabled == 0 and conversion_of(model).bypassed == 0


def test_disable_casts_is_refused_where_parameters_are_low():
    started(nn.Linear(8, 8), opt_level="O3")
    with pytest.raises(RuntimeError, match="the parameters themselves are low"), amp.disable_casts():
        pass
    assert state.disabled == 0


def test_disable_casts_without_initialize_changes_nothing():
    with amp.disable_casts():
        assert nn.Linear(8, 8)(x()).dtype is F32
