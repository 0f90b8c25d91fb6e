"""Functions registered by name: those of other modules are replaced, torch's become overrides of policies."""

from __future__ import annotations

import operator
import types

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxprec
from fxprec import amp
from fxprec.amp._amp_state import AmpState, state
from fxprec.testing import assert_precision

BF16, F32 = torch.bfloat16, torch.float32


@pytest.fixture(autouse=True)
def _fresh_state():
    before = dict(vars(state))
    vars(state).update(vars(AmpState()))
    yield
    vars(state).update(before)


@pytest.fixture
def ops():
    """Somebody's module of functions."""
    module = types.ModuleType("ops")
    module.product = lambda a, b: a @ b
    module.exp = torch.exp
    module.constant = 3
    return module


class Model(nn.Module):
    def __init__(self, ops=None):
        super().__init__()
        self.linear, self.ops = nn.Linear(8, 8), ops
        self.pool = nn.MaxPool1d(2)

    def forward(self, x):
        x = self.linear(x)
        x = x + torch.sigmoid(x) + x.sigmoid() + F.sigmoid(x)
        x = self.pool(x).repeat(1, 2)
        x = self.ops.product(x, self.linear.weight) if self.ops is not None else x
        return F.softmax(self.linear(x), dim=-1) @ self.linear.weight


def started(model, **options):
    model = amp.initialize(model, **{"verbosity": 0, **options})
    model(x())
    return model


def x():
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    "register, expected",
    [(amp.register_float_function, {BF16: 3, F32: 1}), (amp.register_half_function, {BF16: 4})],
)
def test_a_function_of_another_module_is_replaced_at_initialize(register, expected, ops, tools):
    plain = ops.product
    register(ops, "product")
    assert ops.product is plain
    model = started(Model(ops))
    assert ops.product is not plain
    assert tools.matmul_dtypes(model, x()) == expected
    assert ops.product(x(), x().T.bfloat16()).dtype is (F32 if F32 in expected else BF16)


def test_it_is_replaced_once_however_many_models_there_are(ops):
    amp.register_float_function(ops, "product")
    started(Model(ops))
    replaced = ops.product
    started(Model(ops))
    assert ops.product is replaced


def test_a_name_that_leads_to_a_function_of_torch_is_replaced_there(ops):
    amp.register_half_function(ops, "exp")
    started(nn.Linear(8, 8))
    assert ops.exp(x()).dtype is BF16 and torch.exp(x()).dtype is F32


def test_nothing_is_replaced_where_functions_do_not_cast(ops):
    plain = ops.product
    amp.register_float_function(ops, "product")
    for options in ({"opt_level": "O0"}, {"opt_level": "O3"}, {"enabled": False}):
        amp.initialize(nn.Linear(8, 8), verbosity=0, **options)
        assert ops.product is plain


@pytest.mark.parametrize("opt_level", ["O1", "O2"])
@pytest.mark.parametrize("owner, name", [(torch, "sigmoid"), (torch.Tensor, "sigmoid"), (F, "sigmoid")])
def test_a_function_of_torch_becomes_an_override_under_every_spelling(owner, name, opt_level):
    function = getattr(owner, name)
    amp.register_float_function(owner, name)
    model = started(Model(), opt_level=opt_level)
    assert_precision(model, "op:sigmoid", F32)
    assert getattr(owner, name) is function


def test_half_and_promote_of_torch():
    amp.register_half_function(F, "softmax")
    amp.register_promote_function(torch, "matmul")
    model = started(Model())
    assert_precision(model, "op:softmax", BF16)
    (node,) = fxprec.graph_module(model).graph.find_nodes(op="call_function", target=operator.matmul)
    assert node.meta["precision"].rule == "promote"


def test_a_matmul_of_torch_can_be_kept_in_fp32(tools):
    amp.register_float_function(torch, "matmul")
    amp.register_float_function(F, "linear")
    assert tools.matmul_dtypes(started(Model()), x()) == {F32: 3}


def test_the_last_registration_wins():
    amp.register_half_function(torch, "sigmoid")
    amp.register_float_function(torch, "sigmoid")
    assert_precision(started(Model()), "op:sigmoid", F32)


def test_a_class_of_modules_becomes_an_override_where_the_model_has_one():
    amp.register_float_function(nn, "MaxPool1d")
    amp.register_float_function(nn, "Conv2d")
    kind = nn.MaxPool1d
    model = started(Model(), opt_level="O2")
    assert_precision(model, "pool", F32)
    assert nn.MaxPool1d is kind


def test_models_without_the_function_are_converted_as_ever():
    amp.register_float_function(torch, "cumsum")
    assert started(Model())(x()).dtype is F32


@pytest.mark.parametrize(
    "register", [amp.register_half_function, amp.register_float_function, amp.register_promote_function]
)
def test_a_missing_name_is_a_value_error(register, ops):
    with pytest.raises(ValueError, match=r"No function named warp in module <module 'ops'>"):
        register(ops, "warp")
    assert state.registered == []


def test_what_is_no_function_is_refused(ops):
    with pytest.raises(TypeError, match=r"constant of .* is 3: register functions"):
        amp.register_float_function(ops, "constant")
    with pytest.raises(TypeError, match=r"register functions, or classes of nn\.Module"):
        amp.register_float_function(torch, "Generator")
    with pytest.raises(ValueError, match="without a row in the op table, and torch is not patched"):
        amp.register_float_function(torch, "set_num_threads")
    assert state.registered == []


def test_registering_too_late_is_told(ops):
    started(nn.Linear(8, 8))
    with pytest.warns(UserWarning, match="takes effect at the next initialize"):
        amp.register_float_function(ops, "product")
    started(nn.Linear(8, 8))
    assert ops.product(x().bfloat16(), x().T).dtype is F32
