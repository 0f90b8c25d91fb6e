"""Autograd: double backward, gradients of inputs, checkpoints, own functions, hooks of saved tensors, modes."""

from __future__ import annotations

import torch
from torch import nn

from tests.hostile.harness import Cases, Run
from tests.hostile.models import Net, Two, again, net

CASES = case = Cases("autograd")


@case
def gradient_of_the_input(t: Run):
    m, x = t.convert(Two()), t.randn(4, 8).requires_grad_()
    for _ in range(2):
        t.backward(t(m, x))
    t.see("gradient", x.grad)


@case
def gradient_penalty(t: Run):
    m, x = t.convert(net(lambda s, x: s.r(torch.tanh(s.l(x))).sum(), Two)), t.randn(4, 8).requires_grad_()
    (g,) = torch.autograd.grad(t(m, x), x, create_graph=True)
    (g.norm() - 1).square().backward()
    t.see("gradients", (g, x.grad))


@case
def second_derivative(t: Run):
    m, x = t.convert(net(lambda s, x: torch.tanh(s.l(x)).square().sum())), t.randn(4, 8).requires_grad_()
    out = t(m, x)
    (g,) = torch.autograd.grad(out, x, create_graph=True)
    (gg,) = torch.autograd.grad(g.sum(), x)
    t.see("gradients", (g, gg))


@case
def step_of_a_meta_learner(t: Run):
    m, x = t.convert(Two()), t.randn(4, 8)
    grads = torch.autograd.grad(t(m, x).square().mean(), list(m.parameters()), create_graph=True)
    sum(g.square().sum() for g in grads).backward()


@case
def retained_graph(t: Run):
    m, x = t.convert(Two()), t.randn(4, 8).requires_grad_()
    out = t(m, x)
    t.backward(out, retain_graph=True)
    t.backward(out)
    t.see("gradient", x.grad)


@case
def two_forwards_one_backward(t: Run):
    m, x, y = t.convert(Two()), t.randn(4, 8), t.randn(3, 8)
    t.backward([t(m, x), t(m, y)])


@case
def two_forwards_with_eval_between(t: Run):
    m, x = t.convert(nn.Sequential(nn.Linear(8, 8, bias=False), nn.BatchNorm1d(8), nn.Linear(8, 8))), t.randn(4, 8)
    a = t(m.train(), x)
    b = t(m.eval(), x)
    t.backward([a, b])


@case
def gradient_of_some_parameters(t: Run):
    m, x = t.convert(Two()), t.randn(4, 8)
    grads = torch.autograd.grad(t(m, x).sum(), [m.r.bias, m.l.weight, m.l.bias], allow_unused=True)
    t.see("gradients", grads)


@case
def gradient_with_a_vector(t: Run):
    m, x = t.convert(Two()), t.randn(4, 8).requires_grad_()
    t(m, x).backward(t.randn(4, 8))
    t.see("gradient", x.grad)


@case
def gradients_set_to_none_or_kept(t: Run):
    m, x = t.convert(Two()), t.randn(4, 8)
    t.backward(t(m, x))
    m.zero_grad(set_to_none=False)
    t.backward(t(m, x))
    m.zero_grad()
    t.see("none", [p.grad is None for p in m.parameters()])
    t.backward(t(m, x))


@case
def no_grad_around(t: Run):
    m, x = t.convert(Two()), t.randn(4, 8)
    with torch.no_grad():
        t(m, x)
    t.backward(t(m, x))
    with torch.no_grad():
        t(m, x)


@case
def no_grad_decorates(t: Run):
    class M(Two):
        @torch.no_grad()
        def forward(self, x):
            return super().forward(x)

    m = t.convert(M())
    t(m, t.randn(4, 8))
    t(m, t.randn(3, 8))


@case
def no_grad_inside(t: Run):
    def forward(s, x):
        with torch.no_grad():
            h = s.l(x)
        return s.r(h)

    t.changes(net(forward, Two), again)


@case
def enable_grad_inside(t: Run):
    def forward(s, x):
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            energy = torch.tanh(s.l(x)).sum()
            return torch.autograd.grad(energy, x, create_graph=s.training)[0]

    m, x = t.convert(net(forward)), t.randn(4, 8)
    with torch.no_grad():
        t(m.eval(), x)
    t.backward(t(m.train(), x))


@case
def inference_mode_around(t: Run):
    m, x = t.convert(Two()), t.randn(4, 8)
    with torch.inference_mode():
        t(m, x)
    t.backward(t(m, x))
    with torch.inference_mode():
        t(m, x)


@case
def inference_mode_decorates(t: Run):
    class M(Two):
        @torch.inference_mode()
        def forward(self, x):
            return super().forward(x)

    m, x = t.convert(M()), t.randn(4, 8)
    t(m, x)
    t(m, x)


@case
def made_in_inference_mode(t: Run):
    with torch.inference_mode():
        x = t.randn(4, 8)
    m = t.convert(Two())
    with torch.no_grad():
        t(m, x)


@case
def detached_inside(t: Run):
    t.changes(net(lambda s, x: s.r(s.l(x).detach()) + s.l(x), Two), again)


@case
def requires_grad_inside(t: Run):
    def forward(s, x):
        h = s.l(x).detach().requires_grad_()
        return s.r(h), h

    m, x = t.convert(net(forward, Two)), t.randn(4, 8)
    out, h = t(m, x)
    t.backward(out)
    t.see("gradient", h.grad)


@case
def frozen_layer_in_the_middle(t: Run):
    m = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8).requires_grad_(False), nn.Linear(8, 8))
    t.changes(m, again)


@case
def clipped_and_accumulated(t: Run):
    m = t.convert(Two())
    optimizer = torch.optim.Adam(m.parameters(), lr=0.01)
    for _ in range(2):
        for _ in range(2):
            t.backward(t(m, t.randn(4, 8)))
        nn.utils.clip_grad_norm_(m.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


@case
def discriminator_and_generator(t: Run):
    g, d = t.convert(Two()), t.convert(net(lambda s, x: s.l(x).mean()))
    of_g, of_d = torch.optim.SGD(g.parameters(), lr=0.1), torch.optim.SGD(d.parameters(), lr=0.1)
    for _ in range(2):
        fake = t(g, t.randn(4, 8))
        of_d.zero_grad()
        (t(d, fake.detach()) - t(d, t.randn(4, 8))).backward()
        of_d.step()
        of_g.zero_grad()
        (-t(d, fake)).backward()
        of_g.step()


@case
def forward_mode(t: Run):
    m, x, v = t.convert(Net()), t.randn(4, 8), t.randn(4, 8)

    def jvp(x, v):
        with torch.autograd.forward_ad.dual_level():
            out = m(torch.autograd.forward_ad.make_dual(x, v))
            return torch.autograd.forward_ad.unpack_dual(out)

    t.quiet(m, x)
    primal, tangent = t.quiet(jvp, x, v)
    t.see("dual", (primal, tangent))
