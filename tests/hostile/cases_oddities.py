"""Modules of unusual classes, and names that collide: with torch's, with fx's, with Python's."""

from __future__ import annotations

import abc
import dataclasses
import functools
from typing import Generic, TypeVar

import torch
from torch import nn

from tests.hostile.harness import Cases, Run
from tests.hostile.models import Net, Two, again, net

CASES = case = Cases("oddities")

T = TypeVar("T")


@case
def false_as_a_bool(t: Run):
    """A container of layers that is empty in the sense of Python."""

    class M(Two):
        def __len__(self):
            return 0

    m = net(lambda s, x: s.child(s.l(x)) if s.child is not None else x)
    m.child = M()
    t.changes(m, again)
    t.changes(M(), again)


@case(no_twin="modules that are equal become float64 once")
def equal_to_everything(t: Run):
    class M(Two):
        def __eq__(self, other):
            return True

        def __hash__(self):
            return 1

    m = nn.Sequential(M(), M())
    t.changes(m, again)
    t.changes(M(), again)


@case
def attributes_through_a_dict(t: Run):
    class M(Net):
        def __init__(self):
            super().__init__()
            object.__setattr__(self, "own", {"k": 2.0})

        def __setattr__(self, name, value):
            if name in self.__dict__.get("own", ()):
                self.own[name] = value
            else:
                super().__setattr__(name, value)

        def __getattr__(self, name):
            own = self.__dict__.get("own", {})
            return own[name] if name in own else super().__getattr__(name)

        def forward(self, x):
            self.k = self.k + 1
            return self.l(x) * self.k

    t.changes(M(), again, lambda m: setattr(m, "k", 0.5))


@case
def every_read_is_counted(t: Run):
    reads = []

    class M(Net):
        def __getattribute__(self, name):
            if name == "k":
                reads.append(name)
                return float(len(reads))
            return super().__getattribute__(name)

        def forward(self, x):
            return self.l(x) * self.k

    t.changes(M(), again)
    t.see("reads", len(reads))


@case
def call_of_its_own(t: Run):
    class M(Two):
        def __call__(self, x, *, scale=1.0):
            return super().__call__(x) * scale

    m, x = t.convert(M()), t.randn(4, 8)
    t.backward(t(m, x))
    t.backward(t(m, x, scale=3.0))


@case
def forward_by_partialmethod(t: Run):
    class M(Two):
        def run(self, x, scale):
            return super().forward(x) * scale

        forward = functools.partialmethod(run, scale=2.0)  # type: ignore[assignment]

    t.changes(M(), again)


@case
def forward_that_is_decorated(t: Run):
    calls = []

    def counted(function):
        @functools.wraps(function)
        def wrapper(*args, **kwargs):
            calls.append(len(calls))
            return function(*args, **kwargs)

        return wrapper

    class M(Two):
        @counted
        def forward(self, x):
            return super().forward(x)

    t.changes(M(), again)
    t.see("calls", calls)


@case
def forward_that_is_a_property(t: Run):
    class M(Two):
        often = False

        @property
        def forward(self):
            return self.twice if self.often else self.once

        def once(self, x):
            return self.l(x)

        def twice(self, x):
            return self.l(x) * 2

    t.changes(M(), lambda m: setattr(m, "often", True))


@case
def forward_from_a_mixin(t: Run):
    class Scale:
        scale = 2.0

        def forward(self, x):
            return super().forward(x) * self.scale

    class M(Scale, Two):
        pass

    t.changes(M(), lambda m: setattr(Scale, "scale", 0.5))


@case
def abstract_and_generic(t: Run):
    class Base(Net, abc.ABC, Generic[T]):
        @abc.abstractmethod
        def scale(self) -> float: ...

        def forward(self, x):
            return self.l(x) * self.scale()

    class M(Base[int]):
        def scale(self) -> float:
            return 2.0

    t.changes(M(), lambda m: setattr(M, "scale", lambda self: 0.5))


@case
def dataclass_module(t: Run):
    @dataclasses.dataclass(eq=False)
    class M(nn.Module):
        width: int = 8
        scale: float = 2.0

        def __post_init__(self):
            super().__init__()
            self.l = nn.Linear(self.width, self.width)

        def forward(self, x):
            return self.l(x) * self.scale

    t.changes(M(), lambda m: setattr(m, "scale", 0.5))


@case
def metaclass_that_registers(t: Run):
    known = []

    class Registry(type):
        def __init__(cls, name, bases, namespace):
            super().__init__(name, bases, namespace)
            known.append(name)

    class M(Two, metaclass=Registry):
        pass

    t.changes(M(), again)
    t.see("known", known)


@case
def subclasses_are_registered(t: Run):
    known = []

    class M(Two):
        def __init_subclass__(cls, **kwargs):
            super().__init_subclass__(**kwargs)
            known.append(cls.__name__)

    t.changes(M(), again)
    t.see("known", (known, [cls.__name__ for cls in M.__subclasses__() if not hasattr(cls, "_fxprec_original")]))


@case
def class_without_source(t: Run):
    """Executed from a string: there are no lines to show."""
    space = {"nn": nn, "torch": torch, "__name__": "nowhere"}
    exec(
        "class M(nn.Module):\n"
        "    k = 2.0\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.l = nn.Linear(8, 8)\n"
        "    def forward(self, x):\n"
        "        return self.l(x) * self.k * SCALE\n"
        "SCALE = 3.0\n",
        space,
    )
    t.changes(space["M"](), lambda m: space.update(SCALE=0.5))


@case
def names_of_python(t: Run):
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            for name in ("class", "lambda", "None", "self", "def"):
                self.add_module(name, nn.Linear(8, 8))

        def forward(self, x):
            for name in ("class", "lambda", "None", "self", "def"):
                x = torch.tanh(self._modules[name](x))  # type: ignore[misc]
            return x

    t.changes(M(), again)


@case
def names_with_signs(t: Run):
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            for name in ("my-layer", "a b", "1", "über", "__x"):
                self.add_module(name, nn.Linear(8, 8))

        def forward(self, x):
            for layer in self.children():
                x = torch.tanh(layer(x))
            return x

    t.changes(M(), again)


@case
def names_of_fx(t: Run):
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("code", torch.full((8,), 2.0))
            self.graph = nn.Linear(8, 8)
            self.register_parameter("_graph", nn.Parameter(torch.ones(8)))
            self.meta = {"k": 2.0}

        def forward(self, x):
            return self.graph(x) * self.code + self._graph * self.meta["k"]

    t.changes(M(), lambda m: m.meta.update(k=5.0))


@case
def names_of_torch(t: Run):
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.linear, self.input = nn.Parameter(torch.ones(8)), nn.Linear(8, 8), 2.0
            self.placeholder = self.output = nn.Linear(8, 8)

        def forward(self, input):
            return self.output(self.linear(input) * self.weight) * self.input

    t.changes(M(), again)


@case
def arguments_named_as_ours(t: Run):
    def forward(self, module, args=1.0, kwargs=2.0, function=0.0, name="a"):
        return self.l(module) * args + kwargs + function

    m, x = t.convert(net(forward)), t.randn(4, 8)
    t(m, x)
    t(m, module=x, args=3.0, kwargs=t.randn(8), function=1, name="b")
    t(m, x, 2.0, function=t.randn(8))


@case
def attributes_named_as_ours(t: Run):
    m = net(lambda s, x: s.l(x) * s.conversion * s.settings["k"], conversion=2.0, settings={"k": 3.0})
    t.changes(m, lambda m: m.settings.update(k=0.5))


@case
def very_many_arguments(t: Run):
    def forward(s, *xs):
        return s.l(sum(xs))

    m = t.convert(net(forward))
    t(m, *[t.randn(4, 8) for _ in range(40)])
    t(m, *[t.randn(4, 8) for _ in range(39)])


@case
def very_deep(t: Run):
    m = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(25)])
    t.changes(m)


@case
def no_argument(t: Run):
    m = net(lambda s: s.l(s.x))
    m.register_buffer("x", torch.randn(4, 8))
    m = t.convert(m)
    t.backward(t(m))
    with torch.no_grad():
        m.x.mul_(2)
    t.backward(t(m))


@case
def no_parameter(t: Run):
    m, x, w = t.convert(net(lambda s, x, w: torch.relu(x @ w), nn.Module)), t.randn(4, 8), t.randn(8, 8)
    t(m, x, w)
    t.backward(t(m, x, w.requires_grad_()))
    t.see("gradient", w.grad)


@case
def module_that_calls_itself_by_name(t: Run):
    class M(Two):
        def forward(self, x):
            return getattr(self, self.order[0])(getattr(self, self.order[1])(x))

    m = M()
    m.order = ["l", "r"]
    t.changes(m, lambda m: m.order.reverse())


@case
def submodule_through_get(t: Run):
    m = net(lambda s, x: s.get_submodule(s.which)(x) + s.get_parameter("l.bias"), Two, which="l")
    t.changes(m, lambda m: setattr(m, "which", "r"))
