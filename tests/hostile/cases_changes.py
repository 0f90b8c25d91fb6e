"""What changes between conversion, or capture, and a call: attributes, submodules, forwards, flags."""

from __future__ import annotations

import functools
import types

import torch
from torch import nn

import fxprec
from tests.hostile.harness import Cases, Run
from tests.hostile.models import Net, Two, again, net

CASES = case = Cases("changes")


@case
def submodule_replaced(t: Run):
    t.changes(Two(), lambda m: setattr(m, "l", t.wide(nn.Linear(8, 8))))


@case
def submodule_of_another_class(t: Run):
    t.changes(
        Two(),
        lambda m: setattr(m, "l", nn.Identity()),
        lambda m: setattr(m, "l", t.wide(nn.Sequential(nn.Linear(8, 8), nn.Tanh()))),
    )


@case
def submodule_shared(t: Run):
    t.changes(Two(), lambda m: setattr(m, "r", m.l))


@case
def submodules_swapped(t: Run):
    def swap(m):
        m.l, m.r = m.r, m.l

    t.changes(Two(), swap, swap)


@case
def sequential_grows_and_shrinks(t: Run):
    m = net(lambda s, x: s.seq(s.l(x)))
    m.seq = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    t.changes(
        m,
        lambda m: m.seq.append(t.wide(nn.Linear(8, 8))),
        lambda m: m.seq.__delitem__(0),
        lambda m: m.seq.insert(0, t.wide(nn.LayerNorm(8))),
    )


@case
def module_list_reordered(t: Run):
    def forward(s, x):
        for layer in s.layers:
            x = torch.tanh(layer(x))
        return x

    def swap(m):
        m.layers[0], m.layers[1] = m.layers[1], m.layers[0]

    m = net(forward)
    m.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
    t.changes(m, swap, lambda m: m.layers.extend([t.wide(nn.Linear(8, 8))]), lambda m: m.layers.__delitem__(1))


@case
def module_dict_gains_a_key(t: Run):
    m = net(lambda s, x: sum(layer(x) for _, layer in sorted(s.heads.items())))
    m.heads = nn.ModuleDict({"a": nn.Linear(8, 4)})
    t.changes(m, lambda m: m.heads.update({"b": t.wide(nn.Linear(8, 4))}), lambda m: m.heads.pop("a"))


@case
def add_module_and_delete(t: Run):
    m = net(lambda s, x: s.extra(s.l(x)) if "extra" in s._modules else s.l(x))
    t.changes(m, lambda m: m.add_module("extra", t.wide(nn.Linear(8, 8))), lambda m: delattr(m, "extra"))


@case
def child_set_to_none(t: Run):
    m = net(lambda s, x: s.l(x) if s.r is None else s.r(s.l(x)), Two)
    t.changes(m, lambda m: setattr(m, "r", None))


@case
def hyperparameter_of_a_layer(t: Run):
    m = nn.Sequential(nn.Linear(8, 8), nn.LeakyReLU(0.1), nn.LayerNorm(8), nn.Linear(8, 8))
    t.changes(m, lambda m: setattr(m[1], "negative_slope", 0.9), lambda m: setattr(m[2], "eps", 1.0))


@case
def dropout_probability(t: Run):
    m = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.0))
    t.changes(m, lambda m: setattr(m[1], "p", 1.0), lambda m: setattr(m[1], "p", 0.0))


@case
def momentum_of_a_norm(t: Run):
    m = nn.Sequential(nn.Linear(8, 8, bias=False), nn.BatchNorm1d(8), nn.Linear(8, 8))
    t.changes(m, lambda m: setattr(m[1], "momentum", 0.9), lambda m: setattr(m[1], "track_running_stats", False))


@case
def padding_of_a_convolution(t: Run):
    m = t.convert(nn.Sequential(nn.Conv2d(1, 2, 3, padding=1)))
    t.backward(t(m, t.randn(2, 1, 5, 5)))
    m[0].padding = (0, 2)
    m[0].stride = (2, 1)
    t.backward(t(m, t.randn(2, 1, 5, 5)))


@case
def train_and_eval(t: Run):
    m = nn.Sequential(nn.Linear(8, 8, bias=False), nn.BatchNorm1d(8), nn.Linear(8, 8))
    t.changes(m, lambda m: m.eval(), lambda m: m.train(), lambda m: m.eval())


@case
def eval_of_a_part(t: Run):
    m = nn.Sequential(nn.Linear(8, 8, bias=False), nn.BatchNorm1d(8), nn.Linear(8, 8))
    t.changes(m, lambda m: m[1].eval(), lambda m: m[1].train(), lambda m: setattr(m[1], "training", False))


@case
def forward_of_the_instance(t: Run):
    t.changes(
        Net(),
        lambda m: setattr(m, "forward", types.MethodType(lambda self, x: self.l(x) * 3, m)),
        lambda m: m.__dict__.pop("forward", None),
    )


@case
def forward_of_the_instance_before(t: Run):
    m = Net()
    m.forward = lambda x: m.l(x) * 3
    t.changes(m, lambda m: setattr(m, "forward", lambda x: m.l(x) - 3))


@case
def forward_unwrapped(t: Run):
    """Wrapped by what takes over the attributes of the function, and unwrapped by them, as Accelerate does."""

    def wrap(m):
        plain = m.forward.__func__
        m.forward = types.MethodType(functools.wraps(plain)(lambda self, x: plain(self, x) * 2), m)

    def unwrap(m):
        function = m.forward
        while hasattr(function, "__wrapped__"):
            function = function.__wrapped__
        m.forward = types.MethodType(function, m)

    def take_off(m):
        vars(m).pop("forward", None)  # ours: the class's own forward needs no place on the instance

    t.changes(Two(), wrap, unwrap, take_off)


@case
def forward_wrapped(t: Run):
    """As Accelerate and many notebooks do it."""
    calls = []

    def wrap(m):
        plain = m.forward
        m.forward = lambda x: (calls.append(1), plain(x) * 2)[1]

    t.changes(Two(), wrap, again)
    t.see("calls", calls)


@case
def forward_of_a_child_replaced(t: Run):
    t.changes(
        Two(),
        lambda m: setattr(m.l, "forward", lambda x: nn.functional.linear(x, m.l.weight * 2)),
        lambda m: delattr(m.l, "forward"),
    )


@case
def forward_of_a_child_wrapped(t: Run):
    def wrap(m):
        plain = m.l.forward
        m.l.forward = lambda x: plain(x) * 3

    t.changes(Two(), wrap, wrap)


@case
def class_of_the_model_patched(t: Run):
    class M(Two):
        def forward(self, x):
            return super().forward(x) * 2

    def patch(m):
        plain = M.forward
        M.forward = lambda self, x: plain(self, x) + 1

    t.changes(M(), patch, patch)


@case
def call_of_the_class_patched(t: Run):
    class M(Two):
        pass

    def patch(m):
        M.__call__ = lambda self, x: nn.Module.__call__(self, x) * 3

    t.changes(M(), patch)


@case
def base_forward_patched(t: Run):
    class Base(Two):
        def forward(self, x):
            return self.r(self.l(x))

    class M(Base):
        pass

    t.changes(M(), lambda m: setattr(Base, "forward", lambda self, x: self.l(x)))


@case
def reverted_and_converted_again(t: Run):
    def around(m):
        if t.ours:
            fxprec.convert(fxprec.revert(m), dtype=torch.bfloat16, capture=t.variant)

    t.changes(Two(), around, around)


@case
def original_in_between(t: Run):
    class M(Two):
        calls = 0

        def forward(self, x):
            self.calls += 1
            return super().forward(x)

    m, x = t.convert(M()), t.randn(4, 8)
    t(m, x)
    if t.ours:
        with fxprec.original(m):
            m(x)
    else:
        m(x)
    t(m, x)


@case(wide="the outer layer is not converted")
def moved_into_another_model(t: Run):
    inner = t.convert(Two())
    outer = t.wide(nn.Sequential(nn.Linear(8, 8), inner))
    t.watch("outer", outer)
    t.backward(t(outer, t.randn(4, 8)))


@case
def shared_by_two_converted_models(t: Run):
    shared = nn.Linear(8, 8)
    a, b, x = nn.Sequential(shared, nn.ReLU()), nn.Sequential(nn.Tanh(), shared), t.randn(4, 8)
    a, b = t.convert(a), t.convert(b)
    for _ in range(2):
        t.backward(t(lambda x: b(a(x)), x))
        with torch.no_grad():
            shared.weight.mul_(2)


@case
def requires_grad_of_all(t: Run):
    t.changes(Two(), lambda m: m.l.requires_grad_(False), lambda m: m.requires_grad_(True))


@case
def extra_state_and_attributes(t: Run):
    m = t.convert(Two())
    t(m, t.randn(4, 8))
    m.config = {"a": 1}
    m.register_buffer("late", torch.ones(2))
    t(m, t.randn(4, 8))
    t.see("keys", list(m.state_dict()))
    t.see("names", [name for name, _ in m.named_modules()])
