"""State in Python outside of the model: globals, closures, classes, defaults, environment, clocks, random sources."""

from __future__ import annotations

import functools
import itertools
import sys
import types

import torch

from tests.hostile.harness import Cases, Run
from tests.hostile.models import Net, again, net

CASES = case = Cases("state")

K = 2.0
TABLE = {"k": 2.0, "deep": [{"k": 2.0}]}
SPACE = types.SimpleNamespace(k=2.0)
COUNT = itertools.count(1)
PAIR = [2.0]
helper = types.ModuleType("helper")
exec("k = 2.0\ndef scale(x):\n    return x * k\n", helper.__dict__)


def rebound(x):
    return x * 2.0


@case
def global_number(t: Run):
    t.changes(net(lambda s, x: s.l(x) / K), lambda m: t.patch(globals(), "K", 0.1))


@case
def global_dict(t: Run):
    t.changes(net(lambda s, x: s.l(x) / TABLE["k"]), lambda m: t.patch(TABLE, "k", 0.1))


@case
def global_nested(t: Run):
    t.changes(net(lambda s, x: s.l(x) / TABLE["deep"][0]["k"]), lambda m: t.patch(TABLE["deep"][0], "k", 0.1))


@case
def global_namespace(t: Run):
    t.changes(net(lambda s, x: s.l(x) / SPACE.k), lambda m: t.patch(SPACE, "k", 0.1))


@case
def global_function_rebound(t: Run):
    t.changes(net(lambda s, x: rebound(s.l(x))), lambda m: t.patch(globals(), "rebound", lambda x: x - 3.0))


@case
def global_function_through_another(t: Run):
    def through(x):
        return rebound(x) + 1

    t.changes(net(lambda s, x: through(s.l(x))), lambda m: t.patch(globals(), "rebound", lambda x: x - 3.0))


@case
def global_list_grows(t: Run):
    kept = [1.0]
    t.changes(net(lambda s, x: s.l(x) * sum(kept)), lambda m: kept.append(5.0), lambda m: kept.clear())


@case
def global_counter(t: Run):
    t.patch(globals(), "COUNT", itertools.count(1))
    t.changes(net(lambda s, x: s.l(x) * next(COUNT)), again, again)
    t.see("count", next(COUNT))


@case
def global_written_by_the_forward(t: Run):
    t.patch(globals(), "K", 1.0)

    def forward(s, x):
        global K
        K = K + 1.0
        return s.l(x) * K

    t.changes(net(forward), again, again)
    t.see("K", K)


@case
def closure_number(t: Run):
    k = 2.0

    def change(m):
        nonlocal k
        k = 0.1

    t.changes(net(lambda s, x: s.l(x) / k), change)


@case
def closure_dict(t: Run):
    config = {"k": 2.0}
    t.changes(net(lambda s, x: s.l(x) / config["k"]), lambda m: config.update(k=0.1))


@case
def closure_counter(t: Run):
    calls = 0

    def forward(s, x):
        nonlocal calls
        calls += 1
        return s.l(x) * calls

    t.changes(net(forward), again, again)
    t.see("calls", calls)


@case
def class_of_constants(t: Run):
    class Config:
        k = 2.0

    t.changes(net(lambda s, x: s.l(x) / Config.k), lambda m: setattr(Config, "k", 0.1))


@case
def class_property_of_a_metaclass(t: Run):
    box = [2.0]

    class Meta(type):
        @property
        def k(cls):
            return box[0]

    class Config(metaclass=Meta):
        pass

    t.changes(net(lambda s, x: s.l(x) / Config.k), lambda m: box.__setitem__(0, 0.1))


@case
def class_attribute_of_the_model(t: Run):
    class M(Net):
        k = 2.0

        def forward(self, x):
            return self.l(x) / self.k

    t.changes(M(), lambda m: setattr(M, "k", 0.1))


@case
def class_attribute_of_a_base(t: Run):
    class Base(Net):
        k = 2.0

    class M(Base):
        def forward(self, x):
            return self.l(x) / type(self).k

    t.changes(M(), lambda m: setattr(Base, "k", 0.1), lambda m: setattr(M, "k", 3.0))


@case
def mutable_default(t: Run):
    def forward(s, x, seen=[1.0]):  # noqa: B006
        seen.append(len(seen) + 1.0)
        return s.l(x) * sum(seen)

    t.changes(net(forward), again, lambda m: forward.__defaults__[0].clear())
    t.see("default", forward.__defaults__)


@case
def defaults_replaced(t: Run):
    def scale(x, k=2.0):
        return x / k

    t.changes(net(lambda s, x: scale(s.l(x))), lambda m: setattr(scale, "__defaults__", (0.1,)))


@case
def keyword_defaults_changed(t: Run):
    def scale(x, *, k=2.0):
        return x / k

    t.changes(net(lambda s, x: scale(s.l(x))), lambda m: scale.__kwdefaults__.update(k=0.1))


@case
def code_replaced(t: Run):
    def scale(x):
        return x / 2.0

    def other(x):
        return x - 3.0

    t.changes(net(lambda s, x: scale(s.l(x))), lambda m: setattr(scale, "__code__", other.__code__))


@case
def function_attribute(t: Run):
    def scale(x):
        return x / scale.k

    scale.k = 2.0
    t.changes(net(lambda s, x: scale(s.l(x))), lambda m: setattr(scale, "k", 0.1))


@case
def module_with_a_global(t: Run):
    t.patch(sys.modules, "helper", helper)
    t.changes(net(lambda s, x: helper.scale(s.l(x))), lambda m: t.patch(helper, "k", 0.1))


@case
def module_that_is_not_imported(t: Run):
    """Executed by hand, not in sys.modules."""
    t.changes(net(lambda s, x: helper.scale(s.l(x))), lambda m: t.patch(helper, "k", 0.1))


@case
def cached_helper(t: Run):
    @functools.lru_cache
    def scale(n):
        return n * PAIR[0]

    def change(m):
        t.patch(globals(), "PAIR", [0.5])
        scale.cache_clear()

    t.changes(net(lambda s, x: s.l(x) * scale(3)), lambda m: t.patch(globals(), "PAIR", [9.0]), change)


@case
def cached_helper_of_plain_values(t: Run):
    """Its result is a constant of the graph, until the cache is cleared and the value is another one."""

    @functools.cache
    def scale(name, *, times=1):
        return PAIR[0] * times

    def change(m):
        t.patch(globals(), "PAIR", [0.5])
        scale.cache_clear()

    def forward(s, x):
        return s.l(x) * scale("a") + scale("b", times=2)

    t.changes(net(forward), lambda m: t.patch(globals(), "PAIR", [9.0]), change)


@case
def cached_tensor(t: Run):
    """What is written into it stays: dynamo would make it anew."""

    @functools.cache
    def kept(size):
        return t.wide(torch.ones(size))

    def forward(s, x):
        kept(8).add_(1)
        return s.l(x) * kept(8)

    t.changes(net(forward), again)


@case
def partial_of_an_outer_dict(t: Run):
    def scale(config, x):
        return x / config["k"]

    config = {"k": 2.0}
    bound = functools.partial(scale, config)
    t.changes(net(lambda s, x: bound(s.l(x))), lambda m: config.update(k=0.1))


@case
def outer_tensor_replaced(t: Run):
    box = {"w": t.wide(torch.full((8,), 2.0))}
    t.changes(net(lambda s, x: s.l(x) * box["w"]), lambda m: box.update(w=t.wide(torch.full((8,), 5.0))))


@case
def outer_tensor_written(t: Run):
    w = t.wide(torch.full((8,), 2.0))
    t.changes(net(lambda s, x: s.l(x) * w), lambda m: w.fill_(5.0))
    t.watch("w", w)


@case
def outer_module(t: Run):
    outer = t.wide(torch.nn.Linear(8, 8))
    t.watch("outer", outer)

    def change(m):
        with torch.no_grad():
            outer.weight.mul_(3)

    t.changes(net(lambda s, x: outer(s.l(x))), change)


@case
def outer_set_membership(t: Run):
    on = {"scale"}
    t.changes(net(lambda s, x: s.l(x) * (3 if "scale" in on else 1)), lambda m: on.clear())


@case
def outer_flag_with_length(t: Run):
    kept: list[int] = []
    t.changes(net(lambda s, x: s.l(x) * (3 if kept else 1)), lambda m: kept.append(1))


@case
def global_that_appears(t: Run):
    def forward(s, x):
        return s.l(x) * globals().get("LATER", 1.0)

    t.changes(net(forward), lambda m: t.patch(globals(), "LATER", 3.0) if "LATER" in globals() else later(t))


def later(t: Run):
    globals()["LATER"] = 3.0
    t.defer(lambda: globals().pop("LATER"))
