"""torch.func: vmap, grad, jvp, jacobians, functional_call, stacked models."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.func import (
    functional_call,
    grad,
    grad_and_value,
    hessian,
    jacfwd,
    jacrev,
    jvp,
    stack_module_state,
    vjp,
    vmap,
)

from tests.hostile.harness import Cases, Run
from tests.hostile.models import Two, net

CASES = case = Cases("transforms")


def detached(m):
    return {name: value.detach() for name, value in m.named_parameters()}


@case
def batched(t: Run):
    m, xs = t.convert(Two()), t.randn(3, 4, 8)
    t(vmap(m), xs)
    t(m, xs[0])
    t(vmap(m, in_dims=1, out_dims=1), xs)


@case(no_twin="float64 draws another mask")
def batched_with_randomness(t: Run):
    m, xs = t.convert(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5))), t.randn(3, 4, 8)
    t(vmap(m.eval()), xs)
    m.train()
    out = t.quiet(vmap(m, randomness="same"), xs)
    t.see("shape", tuple(out.shape))


@case
def gradient_of_a_function(t: Run):
    m, x = t.convert(Two()), t.randn(4, 8)
    t(grad(lambda x: m(x).square().sum()), x)
    t.backward(t(m, x))


@case
def gradients_of_each_sample(t: Run):
    m, xs = t.convert(Two()), t.randn(3, 8)

    def loss(params, x):
        return functional_call(m, params, (x[None],)).square().sum()

    t(vmap(grad(loss), in_dims=(None, 0)), detached(m), xs)
    t(m, xs)


@case
def value_and_gradient(t: Run):
    m, x = t.convert(Two()), t.randn(4, 8)
    t(grad_and_value(lambda p, x: functional_call(m, p, (x,)).square().sum()), detached(m), x)


@case
def jacobians(t: Run):
    m, x = t.convert(net(lambda s, x: torch.tanh(s.l(x)))), t.randn(8)
    t(jacrev(m), x)
    t(jacfwd(m), x)


@case
def hessians(t: Run):
    m, x = t.convert(net(lambda s, x: torch.tanh(s.l(x)).sum())), t.randn(8)
    t(hessian(m), x)


@case
def products_with_vectors(t: Run):
    m, x, v = t.convert(Two()), t.randn(4, 8), t.randn(4, 8)
    t(lambda x, v: jvp(m, (x,), (v,)), x, v)
    t(lambda x, v: vjp(m, x)[1](v), x, v)


@case
def other_weights(t: Run):
    m, other, x = t.convert(Two()), t.wide(Two()), t.randn(4, 8)
    t(m, x)
    t(lambda x: functional_call(m, detached(other), (x,)), x)
    t(m, x)
    t(lambda x: functional_call(m, {"l.weight": other.l.weight}, (x,)), x)
    t.backward(t(m, x))


@case
def other_weights_that_learn(t: Run):
    m, x = t.convert(Two()), t.randn(4, 8)
    params = {name: value.detach().clone().requires_grad_() for name, value in m.named_parameters()}
    for _ in range(2):
        t.backward(t(lambda x: functional_call(m, params, (x,)), x))
    t.see("gradients", [p.grad for p in params.values()])
    t.see("own", [p.grad is None for p in m.parameters()])


@case
def inner_steps(t: Run):
    """MAML: the gradient goes through updated weights."""
    m, x = t.convert(Two()), t.randn(4, 8)
    params = dict(m.named_parameters())

    def step(params):
        loss = functional_call(m, params, (x,)).square().mean()
        grads = torch.autograd.grad(loss, list(params.values()), create_graph=True)
        return {name: p - 0.1 * g for (name, p), g in zip(params.items(), grads, strict=True)}

    updated = t.quiet(lambda: step(step(params)))
    t.backward(t(lambda x: functional_call(m, updated, (x,)), x))


@case
def other_buffers(t: Run):
    m = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    m, x = t.convert(m), t.randn(4, 8)
    buffers = {name: value.clone() for name, value in m.named_buffers()}
    t(lambda x: functional_call(m, {**dict(m.named_parameters()), **buffers}, (x,)), x)
    t.see("buffers", buffers)


@case
def tied_other_weights(t: Run):
    m = Two()
    m.r.weight = m.l.weight
    m, x = t.convert(m), t.randn(4, 8)
    t(lambda x: functional_call(m, {"l.weight": m.l.weight * 2}, (x,)), x)
    t(m, x)


@case
def an_ensemble(t: Run):
    ms, x = [t.wide(Two()) for _ in range(3)], t.randn(4, 8)
    params, buffers = stack_module_state(ms)
    base = t.convert(copy.deepcopy(ms[0]))
    t(lambda x: vmap(lambda p, b, x: functional_call(base, (p, b), (x,)), in_dims=(0, 0, None))(params, buffers, x), x)
    t(base, x)


@case
def a_transform_inside(t: Run):
    def forward(s, x):
        return vmap(lambda row: torch.tanh(s.l(row)))(x)

    t.changes(net(forward))


@case
def a_gradient_inside(t: Run):
    def forward(s, x):
        return s.r(grad(lambda x: torch.tanh(s.l(x)).sum())(x))

    t.changes(net(forward, Two))


@case
def first_call_in_a_transform(t: Run):
    m, xs = t.convert(Two()), t.randn(3, 4, 8)
    t(vmap(grad(lambda x: m(x).sum())), xs)
    t.backward(t(m, xs))
    with torch.no_grad():
        t(m, xs)


@case
def functional_jacobian(t: Run):
    m, x = t.convert(net(lambda s, x: torch.tanh(s.l(x)).sum(-1))), t.randn(4, 8)
    t(torch.autograd.functional.jacobian, m, x)
    t(torch.autograd.functional.hvp, lambda x: m(x).sum(), x, t.randn(4, 8))
