"""Guards: whatever tracing read and then changes makes the capture miss, says what changed, and no more than that."""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from function_module import as_module
from fxprec.capture.symbolic.guards import Guards
from fxprec.capture.symbolic.trace import trace_static

FACTOR, HALF = 2.0, 0.5


def scaled(x: Tensor) -> Tensor:
    return x * FACTOR


@dataclass(frozen=True)
class Options:
    scale: float


class Child(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.norm, self.drop = nn.BatchNorm1d(4), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.norm(self.fc(x)))


class Model(nn.Module):
    power = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.child, self.unused = Child(), nn.LSTM(2, 2)
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.ReLU()])
        self.scale, self.shape, self.table = 2.0, [1, [2, 3]], {"a": 1}
        self.options, self.activation = Options(3.0), F.relu
        self.counter, self.unread = 0, "anything"
        self.plain = torch.ones(4)
        self.register_buffer("shift", torch.zeros(4))
        self.register_buffer("absent", None)
        self.tied = nn.Linear(4, 4)
        self.tied.weight = self.layers[0].weight

    @property
    def doubled(self) -> float:
        return self.scale * HALF * 4

    def finish(self, x: Tensor) -> Tensor:
        return scaled(x) ** self.power

    def forward(self, x: Tensor, flag: bool = True) -> Tensor:
        x = self.child(x) * self.doubled * self.options.scale * self.table["a"] * self.shape[1][0] + self.plain
        for layer in self.layers:
            x = layer(x)
        if self.absent is not None:
            x = x * self.absent
        if hasattr(self, "extra"):
            x = x * self.extra
        if self.shift.shape[0] > 2:
            x = x + self.shift
        return self.finish(self.activation(self.tied(x)))


def captured(model: nn.Module) -> Guards:
    return trace_static(model, ["x"], {}).guards


CHANGES: dict[str, tuple[Callable[[Model], Any], str]] = {
    "attribute": (lambda m: setattr(m, "scale", 3.0), "scale changed from 2.0 to 3.0"),
    "type of an attribute": (lambda m: setattr(m, "scale", torch.ones(2)), "scale changed from 2.0 to tensor"),
    "eps": (lambda m: setattr(m.child.norm, "eps", 1e-3), "child.norm.eps changed from 1e-05 to 0.001"),
    "eval": (lambda m: m.eval(), "training changed from True to False"),
    "dropout": (lambda m: setattr(m.child.drop, "p", 0.5), "child.drop.p changed from 0.1 to 0.5"),
    "nested list": (lambda m: m.shape[1].append(4), "shape changed from [1, [2, 3]] to [1, [2, 3, 4]]"),
    "dict": (lambda m: m.table.update(a=2), "table changed from {'a': 1} to {'a': 2}"),
    "frozen dataclass": (lambda m: setattr(m, "options", Options(4.0)), "options changed from Options(scale=3.0)"),
    "function": (lambda m: setattr(m, "activation", F.gelu), "activation changed from relu to gelu"),
    "deleted": (lambda m: delattr(m, "scale"), "scale was deleted"),
    "appeared": (lambda m: setattr(m, "extra", 2.0), "extra was set"),
    "appeared as a buffer": (lambda m: m.register_buffer("extra", torch.ones(1)), "extra was set"),
    "class attribute hidden": (lambda m: setattr(m, "power", 2.0), "power was set"),
    "method hidden": (lambda m: setattr(m, "finish", lambda x: x), "finish was set"),
    "forward hidden": (lambda m: setattr(m.child, "forward", lambda x: x), "child.forward was set"),
    "submodule": (lambda m: setattr(m.child, "fc", nn.Linear(4, 4)), "the submodule child.fc was replaced, added or"),
    "list of submodules": (lambda m: m.layers.append(nn.ReLU()), "the submodule layers.2 was replaced, added or"),
    "bias dropped": (lambda m: setattr(m.child.fc, "bias", None), "child.fc.bias changed from Parameter to NoneType"),
    "buffer given": (lambda m: setattr(m, "absent", torch.ones(4)), "absent changed from NoneType to Tensor"),
    "weight deleted": (lambda m: delattr(m.tied, "bias"), "a parameter or buffer was added or deleted"),
    "tensor attribute": (lambda m: setattr(m, "plain", torch.zeros(4)), "the tensor plain was replaced"),
    "shape asked for": (lambda m: setattr(m, "shift", torch.zeros(1)), "shift changed from torch.Size([4]) to"),
    "untied": (
        lambda m: setattr(m.tied, "weight", nn.Parameter(torch.ones(4, 4))),
        "tied.weight and layers.0.weight are no longer one",
    ),
    "class": (
        lambda m: setattr(m.child, "__class__", type("Other", (Child,), {})),
        "class of child changed from",
    ),
    "forward hook": (lambda m: m.child.register_forward_hook(print), "child._forward_hooks got a hook"),
    "pre-hook": (lambda m: m.child.fc.register_forward_pre_hook(print), "child.fc._forward_pre_hooks got a hook"),
    "backward hook": (lambda m: m.child.register_full_backward_hook(print), "child._backward_hooks got a hook"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_misses(name: str) -> None:
    model = Model()
    guards = captured(model)
    assert guards.failing() is None
    change, text = CHANGES[name]
    change(model)
    assert text in (guards.failing() or "")
    if name not in ("deleted", "weight deleted", "forward hook", "pre-hook", "backward hook", "type of an attribute"):
        assert captured(model).failing() is None


@pytest.mark.parametrize(
    "change",
    [
        lambda m: setattr(m, "unread", 3),
        lambda m: setattr(m, "new", 3),
        lambda m: m.unused.eval(),
        lambda m: setattr(m, "scale", float("2.0")),
        lambda m: m.load_state_dict(Model().state_dict()),
        lambda m: setattr(m.child.fc, "weight", nn.Parameter(torch.ones(4, 4))),
        lambda m: m.double(),
        lambda m: m.requires_grad_(False),
        lambda m: m.register_forward_hook(lambda *args: None),
        lambda m: m.unused.register_forward_hook(lambda *args: None),
        lambda m: setattr(m, "__class__", type("Converted", (Model,), {"forward": lambda self, x: x})),
        lambda m: setattr(m, "forward", print),
    ],
)
def test_holds(change: Callable[[Model], Any]) -> None:
    model = Model()
    guards = captured(model)
    change(model)
    assert guards.failing() is None


def test_holds_again_when_the_change_is_taken_back() -> None:
    model = Model()
    guards = captured(model)
    model.eval()
    assert guards.failing() is not None
    model.train()
    assert guards.failing() is None


def test_hooks_dict_replaced_and_then_filled() -> None:
    model = Model()
    guards = captured(model)
    model.child._forward_hooks = type(model.child._forward_hooks)()
    assert guards.failing() is None
    model.child.register_forward_hook(print)
    assert guards.failing() == "child._forward_hooks got a hook"


def test_hook_for_all_modules() -> None:
    guards = captured(Model())
    handle = nn.modules.module.register_module_forward_pre_hook(lambda *args: None)
    try:
        assert guards.failing() == "_global_forward_pre_hooks got a hook"
    finally:
        handle.remove()
    assert guards.failing() is None


def test_forward_of_a_class_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    guards = captured(Model())
    monkeypatch.setattr(Child, "forward", lambda self, x: x)
    assert guards.failing() == "Child.forward was replaced"


def test_class_attribute_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    guards = captured(Model())
    monkeypatch.setattr(Model, "power", 3.0)
    assert guards.failing() == "Model.power changed from 1.0 to 3.0"


def test_global_changed_in_a_function_that_the_forward_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    guards = captured(Model())
    monkeypatch.setitem(scaled.__globals__, "FACTOR", 5.0)
    assert guards.failing() == "the global FACTOR changed from 2.0 to 5.0"


def test_global_changed_in_a_property(monkeypatch: pytest.MonkeyPatch) -> None:
    guards = captured(Model())
    monkeypatch.setitem(scaled.__globals__, "HALF", 1.0)
    assert guards.failing() == "the global HALF changed from 0.5 to 1.0"


def test_forward_set_on_the_model_itself_is_the_callers_business() -> None:
    model = Model()
    model.forward = lambda x: x + model.scale
    guards = captured(model)
    del model.forward
    assert guards.failing() is None


def test_closure_variable_changed() -> None:
    factor = 2.0

    def f(x: Tensor) -> Tensor:
        return x * factor

    guards = trace_static(as_module(f), ["x"], {}).guards
    assert guards.failing() is None
    factor = 3.0
    assert guards.failing() == "the closure variable factor changed from 2.0 to 3.0"


def test_device_of_weights_asked_for() -> None:
    class Asks(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            dtype = next(self.parameters()).dtype
            return super().forward(input) + torch.arange(2, dtype=dtype)

    model = Asks(2, 2)
    guards = trace_static(model, ["input"], {}).guards
    assert guards.failing() is None
    model.double()
    assert "float32" in (guards.failing() or "")


def test_functions_reached_through_a_module_of_the_users_are_searched() -> None:
    module = types.ModuleType("torch_like")
    exec("LEVEL = 1\ndef helper(x):\n    return x * LEVEL", vars(module))
    guards = trace_static(as_module(lambda x: module.helper(x)), ["x"], {}).guards
    assert guards.failing() is None
    module.LEVEL = 2
    assert guards.failing() == "the global LEVEL changed from 1 to 2"
    module.LEVEL, module.helper = 1, lambda x: x
    assert (guards.failing() or "").startswith("the closure variable module.helper changed")


def test_a_comparison_that_raises_is_a_change() -> None:
    class Odd(int):
        def __eq__(self, other: object) -> bool:
            raise RuntimeError

        __hash__ = int.__hash__

    model = Model()
    guards = captured(model)
    model.scale = Odd(2)
    assert "scale changed" in (guards.failing() or "")


def test_a_tensor_asked_for_that_is_gone() -> None:
    class Shaped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(x) / self.fc.weight.shape[0]

    model = Shaped()
    guards = trace_static(model, ("x",), {}).guards
    assert guards.failing() is None
    parameters = model.fc._parameters
    parameters["renamed"] = parameters.pop("weight")  # as many of the same types
    assert guards.failing() == "fc.weight was deleted"


def test_a_list_replaced_by_an_equal_one_is_another() -> None:
    model = Model()
    guards = captured(model)
    before, model.shape = model.shape, [1, [2, 3]]
    assert guards.failing() == "shape was replaced by an equal one"
    model.shape = before
    assert guards.failing() is None


class Pair(NamedTuple):
    number: float
    values: list[float]


PAIR = Pair(1.0, [2.0])


class NamedTuples(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.pair, self.nested = Pair(1.0, [2.0]), [Pair(1.0, [2.0])]

    def forward(self, x: Tensor) -> Tensor:
        return x * self.pair.values[0] * self.nested[0].values[0] * PAIR.values[0]


@pytest.mark.parametrize("owner", ["pair", "nested", "global"])
def test_a_list_in_a_named_tuple_changed(owner: str) -> None:
    model = NamedTuples()
    values = {"pair": model.pair, "nested": model.nested[0], "global": PAIR}[owner].values
    guards = trace_static(model, ("x",), {}).guards
    assert guards.failing() is None
    values[0] = 3.0
    assert guards.failing() is not None
    values[0] = 2.0
    assert guards.failing() is None


def test_an_equal_named_tuple_of_plain_values_is_the_same() -> None:
    model = NamedTuples()
    model.pair = Pair(1.0, (2.0,))  # type: ignore[arg-type]
    guards = trace_static(model, ("x",), {}).guards
    model.pair = Pair(1.0, (2.0,))  # type: ignore[arg-type]
    assert guards.failing() is None
    model.pair = Pair(1, (2.0,))  # type: ignore[arg-type]
    assert guards.failing() is not None
