"""Hooks on the way back: of modules, tensors, parameters, nodes."""

from __future__ import annotations

import torch
from torch.nn.modules import module as modules

from tests.hostile.harness import Cases, Run
from tests.hostile.models import Two, again, net

CASES = case = Cases("gradient_hooks")


@case
def global_backward_hook(t: Run):
    seen = []

    def register(m):
        handle = modules.register_module_full_backward_hook(lambda m, gin, gout: seen.append(type(m).__name__))
        t.defer(handle.remove)

    t.changes(Two(), register)
    t.see("seen", seen)


@case
def backward_hook_of_the_model(t: Run):
    t.comes_and_goes(Two(), lambda m: m.register_full_backward_hook(lambda m, gin, gout: None))


@case
def backward_hook_that_changes(t: Run):
    def hook(m, gin, gout):
        return tuple(g if g is None else g * 2 for g in gin)

    t.comes_and_goes(Two(), lambda m: m.r.register_full_backward_hook(hook))


@case
def backward_pre_hook(t: Run):
    t.comes_and_goes(Two(), lambda m: m.r.register_full_backward_pre_hook(lambda m, gout: (gout[0] * 2,)))


@case
def backward_hook_that_records(t: Run):
    seen = []

    def hook(m, gin, gout):
        seen.append((len(gin), gout[0].shape, gout[0].detach().clone()))

    m = Two()
    m.r.register_full_backward_hook(hook)
    t.changes(m, again)
    t.see("seen", [(n, tuple(shape)) for n, shape, _ in seen])
    t.see("state of gradients", [g for _, _, g in seen])


@case
def tensor_hook_in_the_forward(t: Run):
    def forward(s, x):
        h = s.l(x)
        if h.requires_grad:
            h.register_hook(lambda g: g * 3)
        return s.r(h)

    t.changes(net(forward, Two), again)


@case
def tensor_hook_on_the_output(t: Run):
    m, x = t.convert(Two()), t.randn(4, 8)
    out = t(m, x)
    out.register_hook(lambda g: g * 3)
    t.backward(out)


@case
def retained_gradient(t: Run):
    def forward(s, x):
        s.h = s.l(x)
        s.h.retain_grad()
        return s.r(s.h)

    m, x = t.convert(net(forward, Two)), t.randn(4, 8)
    t.backward(t(m, x))
    t.see("gradient", [m.h.grad.dtype.is_floating_point, tuple(m.h.grad.shape)])


@case
def parameter_hook(t: Run):
    t.comes_and_goes(Two(), lambda m: m.l.weight.register_hook(lambda g: g * 3))


@case
def parameter_hook_before_conversion(t: Run):
    m, seen = Two(), []
    m.l.weight.register_hook(lambda g: (seen.append(g.dtype), g * 3)[1])
    t.changes(m, again)
    t.see("seen", [len(seen), *({*seen} if t.variant != "fp64" else {torch.float32})])


@case
def post_accumulate_hook(t: Run):
    seen = []

    def hook(p):
        seen.append(tuple(p.grad.shape))
        p.grad.mul_(0.5)

    t.comes_and_goes(Two(), lambda m: m.l.weight.register_post_accumulate_grad_hook(hook))
    t.see("seen", seen)


@case
def optimizer_in_the_backward(t: Run):
    """One optimizer a parameter, which steps as soon as its gradient is there."""

    def register(m):
        for p in m.parameters():
            optimizer = torch.optim.SGD([p], lr=0.1)
            p.register_post_accumulate_grad_hook(lambda p, o=optimizer: (o.step(), o.zero_grad())[1])

    t.changes(Two(), register, again, again)


@case
def gradient_hook_of_the_node(t: Run):
    m, seen = t.convert(Two()), []
    out = t(m, t.randn(4, 8))
    out.grad_fn.register_prehook(lambda g: seen.append(tuple(g[0].shape)))
    t.backward(out)
    t.see("seen", seen)
