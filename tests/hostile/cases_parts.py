"""Children, parameters and buffers that come to modules that had none, change places, are hidden, or whose dicts are
replaced."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from tests.hostile.harness import Cases, Run
from tests.hostile.models import Net, net

CASES = case = Cases("parts")


def walking(parts: Callable[[Any], Iterable[Any]], inner: nn.Module | None = None) -> Any:
    """A net that goes through ``parts(self.inner)``: it calls modules, and multiplies by tensors, and adds them."""

    def forward(s: Any, x: Tensor) -> Tensor:
        x = s.l(x)
        for part in parts(s.inner):
            x = part(x) if isinstance(part, nn.Module) else x * part + part
        return x

    return net(forward, inner=nn.Module() if inner is None else inner)


def counting(count: Callable[[Any], int], inner: nn.Module | None = None) -> Any:
    """A net that multiplies by ``count(self.inner)`` and one more."""
    return net(lambda s, x: s.l(x) * (1 + count(s.inner)), inner=nn.Module() if inner is None else inner)


def layer(t: Run) -> nn.Module:
    return t.wide(nn.Linear(8, 8))


def numbers(t: Run, value: float) -> nn.Parameter:
    return nn.Parameter(t.wide(torch.full((8,), value)))


def with_two(t: Run, kind: str) -> nn.Module:
    """A module without a forward that has ``a`` and ``b``."""
    inner = nn.Module()
    for name, value in (("a", 2.0), ("b", 3.0)):
        if kind == "parameters":
            inner.register_parameter(name, nn.Parameter(torch.full((8,), value)))
        elif kind == "buffers":
            inner.register_buffer(name, torch.full((8,), value))
        else:
            inner.add_module(name, nn.Linear(8, 8) if name == "a" else nn.Tanh())
    return inner


def last(m: Any) -> None:
    """The first part comes last."""
    for parts in (m.inner._modules, m.inner._parameters, m.inner._buffers):
        if parts:
            name = next(iter(parts))
            parts[name] = parts.pop(name)


# -- what was empty ------------------------------------------------------------------------------------------------


@case
def empty_module_list(t: Run):
    t.changes(walking(iter, nn.ModuleList()), lambda m: m.inner.append(layer(t)))


@case
def empty_module_list_counted(t: Run):
    t.changes(counting(len, nn.ModuleList()), lambda m: m.inner.append(layer(t)))


@case
def empty_module_list_asked(t: Run):
    t.changes(counting(bool, nn.ModuleList()), lambda m: m.inner.append(layer(t)))


@case
def empty_list_in_a_list(t: Run):
    model = walking(lambda lists: [each for part in lists for each in part], nn.ModuleList([nn.ModuleList()]))
    t.changes(model, lambda m: m.inner[0].append(layer(t)))


@case
def empty_sequential(t: Run):
    t.changes(net(lambda s, x: s.inner(s.l(x)), inner=nn.Sequential()), lambda m: m.inner.append(layer(t)))


@case
def empty_module_dict(t: Run):
    t.changes(walking(lambda d: d.values(), nn.ModuleDict()), lambda m: m.inner.update({"a": layer(t)}))


@case
def empty_module_dict_asked(t: Run):
    t.changes(counting(lambda d: "a" in d, nn.ModuleDict()), lambda m: m.inner.update({"a": layer(t)}))


@case
def empty_parameter_list(t: Run):
    t.changes(walking(iter, nn.ParameterList()), lambda m: m.inner.append(numbers(t, 3.0)))


@case
def empty_parameter_dict(t: Run):
    t.changes(walking(lambda d: d.values(), nn.ParameterDict()), lambda m: m.inner.update({"a": numbers(t, 3.0)}))


@case
def first_child(t: Run):
    t.changes(walking(lambda s: s.children()), lambda m: m.inner.add_module("a", layer(t)))


@case
def first_child_in_the_dict(t: Run):
    t.changes(walking(lambda s: s._modules.values()), lambda m: m.inner.add_module("a", layer(t)))


@case
def first_parameter(t: Run):
    t.changes(walking(lambda s: s.parameters()), lambda m: m.inner.register_parameter("a", numbers(t, 3.0)))


@case
def first_buffer(t: Run):
    t.changes(walking(lambda s: s.buffers()), lambda m: m.inner.register_buffer("a", numbers(t, 3.0).data))


@case
def first_buffer_in_the_dict(t: Run):
    t.changes(walking(lambda s: s._buffers.values()), lambda m: m.inner.register_buffer("a", numbers(t, 3.0).data))


@case
def first_buffer_of_the_model(t: Run):
    model = net(lambda s, x: s.l(x) * (1 + len([*s.buffers()])))
    t.changes(model, lambda m: m.register_buffer("a", numbers(t, 3.0).data))


@case
def modules_counted(t: Run):
    model = net(lambda s, x: s.l(x) * len([*s.modules()]))
    t.changes(model, lambda m: m.l.add_module("a", layer(t)))


@case
def state_counted(t: Run):
    t.changes(counting(lambda s: len(s.state_dict())), lambda m: m.inner.register_parameter("a", numbers(t, 3.0)))


# -- places --------------------------------------------------------------------------------------------------------


@case
def module_dict_in_another_order(t: Run):
    inner = nn.ModuleDict({"a": nn.Linear(8, 8), "b": nn.Tanh()})
    t.changes(walking(lambda d: d.values(), inner), lambda m: m.inner.update({"a": m.inner.pop("a")}))


@case
def sequential_in_another_order(t: Run):
    t.changes(net(lambda s, x: s.inner(s.l(x)), inner=nn.Sequential(nn.Linear(8, 8), nn.Tanh())), last)


@case
def children_in_another_order(t: Run):
    t.changes(walking(lambda s: s.children(), with_two(t, "children")), last)


@case
def parameters_in_another_order(t: Run):
    t.changes(walking(lambda s: s.parameters(), with_two(t, "parameters")), last)


@case
def buffers_in_another_order(t: Run):
    t.changes(walking(lambda s: s.buffers(), with_two(t, "buffers")), last)


# -- hidden by an attribute ----------------------------------------------------------------------------------------


def hides(t: Run, owner: str, name: str, value: Any, model: Any) -> None:
    """An attribute of the instance stands before a part of that name, and goes again."""

    def show(m: Any) -> None:
        del vars(m.get_submodule(owner))[name]

    t.changes(model, lambda m: vars(m.get_submodule(owner)).update({name: value}), show)


@case
def hidden_child(t: Run):
    hides(t, "", "l", torch.tanh, Net())


@case
def hidden_weight(t: Run):
    hides(t, "l", "weight", t.wide(torch.eye(8)), Net())


@case
def hidden_parameter(t: Run):
    hides(t, "", "k", t.wide(torch.full((8,), 7.0)), net(lambda s, x: s.l(x) * s.k, k=nn.Parameter(torch.ones(8))))


@case
def hidden_buffer(t: Run):
    model = net(lambda s, x: s.l(x) * s.k)
    model.register_buffer("k", torch.ones(8))
    hides(t, "", "k", t.wide(torch.full((8,), 7.0)), model)


@case
def hidden_by_the_class(t: Run):
    model = net(lambda s, x: s.l(x) * s.k, k=nn.Parameter(torch.ones(8)))
    kind = type(model)
    t.changes(model, lambda m: setattr(kind, "k", t.wide(torch.full((8,), 7.0))), lambda m: delattr(kind, "k"))


# -- dicts that are replaced ---------------------------------------------------------------------------------------


@case
def attributes_of_another(t: Run):
    t.changes(Net(), lambda m: vars(m.l).update(copy.deepcopy(vars(layer(t)))))


@case
def state_of_another(t: Run):
    t.changes(Net(), lambda m: m.l.__setstate__(copy.deepcopy(vars(layer(t)))))


@case
def parameters_of_another(t: Run):
    def later(m: Any) -> None:
        m.l.weight = nn.Parameter(t.wide(torch.eye(8)))

    t.changes(Net(), lambda m: setattr(m.l, "_parameters", dict(layer(t)._parameters)), later)


@case
def parameters_in_a_copy(t: Run):
    def later(m: Any) -> None:
        m.l.weight = nn.Parameter(t.wide(torch.eye(8)))

    t.changes(Net(), lambda m: setattr(m.l, "_parameters", dict(m.l._parameters)), later)


@case
def buffers_of_another(t: Run):
    model = net(lambda s, x: s.l(x) * s.k)
    model.register_buffer("k", torch.ones(8))
    t.changes(model, lambda m: setattr(m, "_buffers", {"k": t.wide(torch.full((8,), 7.0))}))


@case
def children_of_another(t: Run):
    t.changes(Net(), lambda m: setattr(m, "_modules", {"l": layer(t)}))
