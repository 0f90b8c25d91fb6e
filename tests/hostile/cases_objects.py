"""What a forward reaches from the module: objects, classes, descriptors, properties, slots, bound methods."""

from __future__ import annotations

import dataclasses
import enum
import functools
import types
import weakref

import torch
from torch import nn

from tests.hostile.harness import Cases, Run
from tests.hostile.models import Net, again, net

CASES = case = Cases("objects")


class Thing:
    """A plain object with a number."""

    def __init__(self, k: float = 2.0) -> None:
        self.k = k

    def scale(self, x):
        return x / self.k


@case
def plain_object(t: Run):
    t.changes(net(lambda s, x: s.l(x) / s.thing.k, thing=Thing()), lambda m: setattr(m.thing, "k", 0.1))


@case
def object_in_an_object(t: Run):
    thing = Thing()
    thing.inner = Thing()
    t.changes(net(lambda s, x: s.l(x) / s.thing.inner.k, thing=thing), lambda m: setattr(m.thing.inner, "k", 0.1))


@case
def object_in_a_list_in_a_dict(t: Run):
    things = {"a": [Thing(), Thing()]}
    t.changes(net(lambda s, x: s.l(x) / s.d["a"][1].k, d=things), lambda m: setattr(m.d["a"][1], "k", 0.1))


@case
def class_as_attribute(t: Run):
    class Config:
        k = 2.0

    t.changes(net(lambda s, x: s.l(x) / s.config.k, config=Config), lambda m: setattr(Config, "k", 0.1))


@case
def module_as_attribute(t: Run):
    helper = types.ModuleType("helper")
    helper.k = 2.0
    t.changes(net(lambda s, x: s.l(x) / s.helper.k, helper=helper), lambda m: setattr(helper, "k", 0.1))


@case
def bound_method_as_attribute(t: Run):
    thing = Thing()
    t.changes(net(lambda s, x: s.pre(s.l(x)), pre=thing.scale), lambda m: setattr(thing, "k", 0.1))


@case
def function_as_attribute(t: Run):
    t.changes(net(lambda s, x: s.f(s.l(x)), f=torch.relu), lambda m: setattr(m, "f", torch.tanh))


@case
def partial_over_a_dict(t: Run):
    config = {"k": 2.0}
    scale = functools.partial(lambda c, x: x / c["k"], config)
    t.changes(net(lambda s, x: s.f(s.l(x)), f=scale), lambda m: config.update(k=0.1))


@case
def partial_with_keywords(t: Run):
    scale = functools.partial(lambda x, k: x / k, k=2.0)
    t.changes(net(lambda s, x: s.f(s.l(x)), f=scale), lambda m: m.f.keywords.update(k=0.1))


@case
def callable_object(t: Run):
    class Scale(Thing):
        def __call__(self, x):
            self.k += 1
            return x / self.k

    t.changes(net(lambda s, x: s.f(s.l(x)), f=Scale()), again, lambda m: setattr(m.f, "k", 0.1))


@case
def frozen_dataclass_that_holds_a_dict(t: Run):
    @dataclasses.dataclass(frozen=True)
    class Config:
        values: dict

    config = Config({"k": 2.0})
    t.changes(net(lambda s, x: s.l(x) / s.c.values["k"], c=config), lambda m: config.values.update(k=0.1))


@case
def dataclass_field(t: Run):
    @dataclasses.dataclass
    class Config:
        k: float = 2.0

    t.changes(net(lambda s, x: s.l(x) / s.c.k, c=Config()), lambda m: setattr(m.c, "k", 0.1))


@case
def frozen_dataclass_replaced(t: Run):
    @dataclasses.dataclass(frozen=True)
    class Config:
        k: float = 2.0

    t.changes(net(lambda s, x: s.l(x) / s.c.k, c=Config()), lambda m: setattr(m, "c", dataclasses.replace(m.c, k=0.1)))


@case
def frozen_dataclass_forced(t: Run):
    @dataclasses.dataclass(frozen=True)
    class Config:
        k: float = 2.0

    t.changes(net(lambda s, x: s.l(x) / s.c.k, c=Config()), lambda m: object.__setattr__(m.c, "k", 0.1))


@case
def slots(t: Run):
    class Slotted:
        __slots__ = ("k",)

        def __init__(self):
            self.k = 2.0

    t.changes(net(lambda s, x: s.l(x) / s.c.k, c=Slotted()), lambda m: setattr(m.c, "k", 0.1))


@case
def enumeration(t: Run):
    class Mode(enum.Enum):
        HALF = 2.0
        TENTH = 10.0

    t.changes(net(lambda s, x: s.l(x) / s.mode.value, mode=Mode.HALF), lambda m: setattr(m, "mode", Mode.TENTH))


@case
def enumeration_decides(t: Run):
    Mode = enum.Enum("Mode", ["A", "B"])
    t.changes(net(lambda s, x: s.l(x) if s.mode is Mode.A else -x, mode=Mode.A), lambda m: setattr(m, "mode", Mode.B))


@case
def own_dict_by_vars(t: Run):
    t.changes(net(lambda s, x: s.l(x) / vars(s)["k"], k=2.0), lambda m: setattr(m, "k", 0.1))


@case
def own_dict_by_name(t: Run):
    t.changes(net(lambda s, x: s.l(x) / s.__dict__.get("k", 1.0)), lambda m: setattr(m, "k", 0.1))


@case
def attribute_by_name(t: Run):
    t.changes(
        net(lambda s, x: s.l(x) / getattr(s, "k" + str(s.which)), k1=2.0, k2=0.1, which=1),
        lambda m: setattr(m, "which", 2),
        lambda m: setattr(m, "k2", 5.0),
    )


@case
def attribute_that_appears(t: Run):
    t.changes(
        net(lambda s, x: s.l(x) * (3 if hasattr(s, "late") else 1)),
        lambda m: setattr(m, "late", None),
        lambda m: delattr(m, "late"),
    )


@case
def attribute_with_a_default(t: Run):
    t.changes(net(lambda s, x: s.l(x) * getattr(s, "late", 1.0)), lambda m: setattr(m, "late", 3.0))


@case
def property_over_a_dict(t: Run):
    config = {"k": 2.0}

    class M(Net):
        @property
        def k(self):
            return config["k"]

        def forward(self, x):
            return self.l(x) / self.k

    t.changes(M(), lambda m: config.update(k=0.1))


@case
def cached_property(t: Run):
    class M(Net):
        k = 2.0

        @functools.cached_property
        def scale(self):
            return self.k * 2

        def forward(self, x):
            return self.l(x) / self.scale

    def change(m):
        del m.scale
        m.k = 0.1

    t.changes(M(), lambda m: setattr(m, "k", 9.0), change)


@case
def data_descriptor(t: Run):
    class Field:
        value = 2.0

        def __get__(self, owner, kind):
            return self.value

        def __set__(self, owner, value):
            self.value = value

    class M(Net):
        k = Field()

        def forward(self, x):
            return self.l(x) / self.k

    t.changes(M(), lambda m: setattr(m, "k", 0.1), lambda m: setattr(M.__dict__["k"], "value", 3.0))


@case
def descriptor_that_counts(t: Run):
    class Field:
        reads = 0

        def __get__(self, owner, kind):
            Field.reads += 1
            return float(Field.reads)

    class M(Net):
        k = Field()

        def forward(self, x):
            return self.l(x) / self.k

    t.changes(M(), again, again)
    t.see("reads", Field.reads)


@case
def getattr_of_the_module(t: Run):
    class M(Net):
        def __init__(self):
            super().__init__()
            self.values = {"k": 2.0}

        def __getattr__(self, name):
            if name == "k":
                return self.values["k"]
            return super().__getattr__(name)

        def forward(self, x):
            return self.l(x) / self.k

    t.changes(M(), lambda m: m.values.update(k=0.1))


@case
def getattr_of_an_object(t: Run):
    class Lazy:
        def __init__(self):
            self.values = {"k": 2.0}

        def __getattr__(self, name):
            return self.__dict__["values"][name]

    t.changes(net(lambda s, x: s.l(x) / s.c.k, c=Lazy()), lambda m: m.c.values.update(k=0.1))


@case
def weak_reference(t: Run):
    thing = Thing()
    t.changes(net(lambda s, x: s.l(x) / s.ref().k, ref=weakref.ref(thing)), lambda m: setattr(thing, "k", 0.1))


@case
def parent_in_a_list(t: Run):
    class Child(nn.Module):
        def __init__(self, parent):
            super().__init__()
            self.parent = [parent]

        def forward(self, x):
            return x / self.parent[0].k

    m = net(lambda s, x: s.child(s.l(x)), k=2.0)
    m.child = Child(m)
    t.changes(m, lambda m: setattr(m, "k", 0.1))
