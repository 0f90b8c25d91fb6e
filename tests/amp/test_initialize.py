"""``initialize``: what comes back, what it refuses with apex's exception types, and that a refusal changes nothing."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import fxprec
from fxprec import amp
from fxprec.amp._amp_state import AmpState, state
from fxprec.model.conversion import is_converted


@pytest.fixture(autouse=True)
def _fresh_state():
    before = dict(vars(state))
    vars(state).update(vars(AmpState()))
    yield
    vars(state).update(before)


def net():
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))


def sgd(*models, **options):
    return torch.optim.SGD([p for model in models for p in model.parameters()], lr=0.1, momentum=0.9, **options)


def trained(model, optimizer):
    """An optimizer with state."""
    model(torch.randn(3, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


class Snapshot:
    """Everything that a refused initialize must leave alone."""

    def __init__(self, models, optimizers):
        self.models, self.optimizers = models, optimizers
        self.of_models = [self.model(model) for model in models]
        self.of_optimizers = [self.optimizer(optimizer) for optimizer in optimizers]
        self.of_state = {**vars(state), "models": set(state.models), "registered": [*state.registered]}

    @staticmethod
    def model(model):
        tensors = [(id(t), t.dtype, t.data_ptr(), t.detach().clone()) for t in (*model.parameters(), *model.buffers())]
        hooks = [
            {name: len(value) for name, value in vars(m).items() if name.endswith("hooks")} for m in model.modules()
        ]
        return type(model), list(vars(model)), hooks, tensors

    @staticmethod
    def optimizer(optimizer):
        return list(vars(optimizer)), optimizer.step, id(optimizer.state), copy.deepcopy(optimizer.state_dict())

    def assert_unchanged(self):
        for model, (kind, attributes, hooks, tensors) in zip(self.models, self.of_models, strict=True):
            now = self.model(model)
            assert now[:3] == (kind, attributes, hooks) and not is_converted(model)
            for new, old in zip(now[3], tensors, strict=True):
                assert new[:3] == old[:3] and torch.equal(new[3], old[3])
        for optimizer, old in zip(self.optimizers, self.of_optimizers, strict=True):
            new = self.optimizer(optimizer)
            assert new[:3] == old[:3] and str(new[3]) == str(old[3])
        assert {**vars(state), "models": set(state.models), "registered": [*state.registered]} == self.of_state


def test_what_comes_back_has_the_shape_of_what_was_given():
    a, b = net(), net()
    first, second = sgd(a), sgd(b)
    assert amp.initialize(net(), verbosity=0).training
    models = [net(), net()]
    assert amp.initialize(models, verbosity=0) is models
    assert amp.initialize(a, first, verbosity=0) == (a, first)
    both = amp.initialize([b], [second], verbosity=0)
    assert both == ([b], [second])
    model, optimizers = amp.initialize(net(), [], verbosity=0)
    assert is_converted(model) and optimizers == []
    models = [net(), net()]
    found, optimizer = amp.initialize(models, sgd(*models), verbosity=0)
    assert found is models and all(map(is_converted, models)) and isinstance(optimizer, torch.optim.SGD)


def test_disabled_it_returns_what_it_was_given():
    model, optimizer = net(), sgd(net())
    assert amp.initialize(model, enabled=False) is model
    assert amp.initialize([model], [optimizer], enabled=False) == ([model], [optimizer])
    assert not is_converted(model) and "step" not in vars(optimizer)


def test_the_options_are_printed_once_unless_verbosity_is_0(capsys):
    amp.initialize(net(), opt_level="O2", loss_scale="128.0")
    printed = capsys.readouterr().out
    assert "Selected optimization level O2" in printed and "loss_scale             : 128.0" in printed
    amp.initialize(net(), verbosity=0)
    assert capsys.readouterr().out == ""


def holding():
    """A model that cannot be converted: a part of it is."""
    return nn.Sequential(fxprec.convert(net())[0])


@pytest.mark.parametrize(
    "spoil, error, words",
    [
        (lambda a, b, o: ((a, b), [o], {}), TypeError, "models must be either a single model or a list"),
        (lambda a, b, o: ([a, "b"], [o], {}), TypeError, "models must be .* not str"),
        (lambda a, b, o: ([a, b], (o,), {}), TypeError, "optimizers must be either a single optimizer or a list"),
        (lambda a, b, o: ([a, b], [o, None], {}), TypeError, "optimizers must be"),
        (lambda a, b, o: (None, [o], {}), TypeError, "models must be"),
        (lambda a, b, o: ([a, b], [o, o], {}), RuntimeError, "only be passed through amp.initialize once"),
        (lambda a, b, o: ([a, nn.DataParallel(b)], o, {}), RuntimeError, "AFTER"),
        (
            lambda a, b, o: ([a, holding()], o, {"opt_level": "O3"}),
            RuntimeError,
            "its submodule '0' is converted already",
        ),
        (lambda a, b, o: ([a, net().half()], o, {}), RuntimeError, "Found param"),
        (lambda a, b, o: ([a, b], o, {"opt_level": "O5"}), RuntimeError, "Unexpected optimization level"),
        (lambda a, b, o: ([a, b], o, {"master_weights": True}), RuntimeError, "master_weights"),
        (lambda a, b, o: ([a, b], o, {"opt_level": "O3", "num_losses": 0}), ValueError, "num_losses"),
        (lambda a, b, o: ([a, b], o, {"num_losses": True}), ValueError, "num_losses"),
        (lambda a, b, o: ([a, b], o, {"min_loss_scale": -1.0}), ValueError, "finite and greater than 0"),
        (lambda a, b, o: ([a, b], o, {"cast_model_outputs": torch.int32}), TypeError, "cast_model_outputs"),
        (lambda a, b, o: ([a, b], o, {"cast_model_outputs": "half"}), TypeError, "cast_model_outputs"),
    ],
)
def test_a_refusal_has_the_type_of_apex_and_changes_nothing(spoil, error, words):
    a, b = net(), net()
    a, optimizer = trained(a, sgd(a, b))
    models, optimizers, options = spoil(a, b, optimizer)
    before = Snapshot([a, b], [optimizer])
    with pytest.raises(error, match=words):
        amp.initialize(models, optimizers, verbosity=0, **options)
    before.assert_unchanged()


def test_a_refusal_half_way_takes_everything_back():
    """At O3 parameters, hooks, functions and optimizer state are changed on the way; the last optimizer fails."""
    a, b = net(), net()
    a, first = trained(a, sgd(a))
    b, second = trained(b, sgd(b))

    def fail(_):
        raise RuntimeError("this optimizer loads no state")

    second.load_state_dict = fail
    before = Snapshot([a, b], [first, second])
    with pytest.raises(RuntimeError, match="loads no state"):
        amp.initialize(
            [a, b],
            [first, second],
            opt_level="O3",
            keep_batchnorm_fp32=True,
            cast_model_outputs=torch.bfloat16,
            verbosity=0,
        )
    before.assert_unchanged()


def test_a_registered_function_is_put_back_after_a_refusal():
    class Home:
        @staticmethod
        def product(a, b):
            return a @ b

    function = Home.product
    amp.register_float_function(Home, "product")
    with pytest.raises(RuntimeError, match="its submodule '0' is converted already"):
        amp.initialize([net(), holding()], verbosity=0)
    assert Home.product is function and state.low is None


def test_state_of_an_optimizer_follows_its_parameters_at_o3():
    model = net()
    optimizer = sgd(model)
    trained(model, optimizer)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O3", verbosity=0)
    assert {s["momentum_buffer"].dtype for s in optimizer.state.values()} == {torch.bfloat16}
    trained(model, optimizer)


def test_state_of_an_optimizer_is_untouched_where_parameters_stay():
    model = net()
    optimizer = sgd(model)
    trained(model, optimizer)
    buffers = {id(p): s["momentum_buffer"] for p, s in optimizer.state.items()}
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    assert all(s["momentum_buffer"] is buffers[id(p)] for p, s in optimizer.state.items())


def test_an_optimizer_goes_through_once():
    model = net()
    model, optimizer = amp.initialize(model, sgd(model), verbosity=0)
    step = optimizer.step
    with pytest.raises(RuntimeError, match=r"only be passed through amp\.initialize once\. This SGD was"):
        amp.initialize(net(), optimizer, verbosity=0)
    assert optimizer.step == step


@pytest.mark.parametrize("listed", [True, False])
def test_an_fp16_optimizer_is_refused(listed):
    model = net()
    wrapped = amp.FP16_Optimizer(sgd(model), verbose=False)
    with pytest.raises(RuntimeError, match="An incoming optimizer is an instance of FP16_Optimizer"):
        amp.initialize(model, [wrapped] if listed else wrapped, verbosity=0)


def test_a_second_call_makes_new_scalers_and_earlier_optimizers_use_them():
    first = net()
    first, old = amp.initialize(first, sgd(first), verbosity=0)
    amp.load_state_dict({"loss_scaler0": {"loss_scale": 4.0, "unskipped": 1}})
    second = net()
    second, _ = amp.initialize(second, sgd(second), num_losses=2, verbosity=0)
    assert [entry["loss_scale"] for entry in amp.state_dict().values()] == [65536.0, 65536.0]
    with amp.scale_loss(first(torch.randn(3, 4)).sum(), old, loss_id=1) as scaled:
        scaled.backward()
    old.step()
    assert [entry["unskipped"] for entry in amp.state_dict().values()] == [0, 1]


def test_min_and_max_loss_scale_reach_the_scalers():
    amp.initialize(net(), min_loss_scale=2.0, max_loss_scale=1024.0, verbosity=0)
    assert amp.state_dict()["loss_scaler0"]["loss_scale"] == 1024.0
    amp.initialize(net(), min_loss_scale=2.0**20, max_loss_scale=None, verbosity=0)
    assert amp.state_dict()["loss_scaler0"]["loss_scale"] == 2.0**20
