"""Checkpoints, autograd functions of one's own, hooks of saved tensors, anomaly mode."""

from __future__ import annotations

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from tests.hostile.harness import Cases, Run
from tests.hostile.models import Two, again, net

CASES = case = Cases("functions")


class Cube(torch.autograd.Function):
    """With its own backward; what it saves it needs again."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * 3 * x**2


class InFull(torch.autograd.Function):
    """As apex and many kernels have it: FP32 inside under autocast."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float32)
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.exp()

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx, g):
        return g * ctx.saved_tensors[0].exp()


class Straight(torch.autograd.Function):
    """A straight-through estimator with two stages."""

    @staticmethod
    def forward(x, scale):
        return (x * scale).round() / scale

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.scale = inputs[1]

    @staticmethod
    def backward(ctx, g):
        return g, None


@case
def checkpoint_without_reentry(t: Run):
    t.changes(net(lambda s, x: s.r(checkpoint(lambda x: torch.tanh(s.l(x)), x, use_reentrant=False)), Two), again)


@case
def checkpoint_with_reentry(t: Run):
    t.changes(net(lambda s, x: s.r(checkpoint(lambda x: torch.tanh(s.l(x)), s.l(x), use_reentrant=True)), Two), again)


@case(no_twin="float64 draws another mask")
def checkpoint_with_dropout(t: Run):
    def forward(s, x):
        return s.r(checkpoint(lambda x: nn.functional.dropout(s.l(x), 0.5), x, use_reentrant=False))

    t.changes(net(forward, Two), again)


@case
def checkpoint_around_the_model(t: Run):
    m, x = t.convert(Two()), t.randn(4, 8).requires_grad_()
    for reentrant in (False, True):
        t.backward(t(checkpoint, m, x, use_reentrant=reentrant))
    t.see("gradient", x.grad)


@case
def checkpoint_that_counts(t: Run):
    calls = []

    def forward(s, x):
        def body(x):
            calls.append(1)
            return torch.tanh(s.l(x))

        return s.r(checkpoint(body, x, use_reentrant=False))

    t.changes(net(forward, Two), again)
    t.see("calls", len(calls))


@case
def own_function(t: Run):
    t.changes(net(lambda s, x: s.r(Cube.apply(s.l(x))), Two), again)


@case
def own_function_in_full(t: Run):
    t.changes(net(lambda s, x: s.r(InFull.apply(s.l(x))), Two), again)


@case
def own_function_in_two_stages(t: Run):
    t.changes(net(lambda s, x: s.r(Straight.apply(torch.tanh(x), 4.0) + s.l(x)), Two), again)


@case(
    wide="what a graph hands to a function of one's own is FP32, as in the original, and so is the backward's product"
)
def own_function_with_a_product(t: Run):
    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w):
            ctx.save_for_backward(x, w)
            return x @ w.t()

        @staticmethod
        def backward(ctx, g):
            x, w = ctx.saved_tensors
            return g.to(w.dtype) @ w, g.to(x.dtype).t() @ x

    t.changes(net(lambda s, x: Product.apply(s.l(x), s.r.weight), Two), again)


@case
def own_function_that_reverses(t: Run):
    class Reverse(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, k):
            ctx.k = k
            return x.view_as(x)

        @staticmethod
        def backward(ctx, g):
            return -ctx.k * g, None

    m, x = t.convert(net(lambda s, x, k: s.r(Reverse.apply(s.l(x), k)), Two)), t.randn(4, 8)
    for k in (1.0, 0.5):
        t.backward(t(m, x, k))


@case
def anomaly_mode(t: Run):
    m, x = t.convert(Two()), t.randn(4, 8)
    with torch.autograd.set_detect_anomaly(True):
        t.backward(t(m, x))
    t.backward(t(m, x))


@case
def saved_tensors_are_packed(t: Run):
    m, x, packed = t.convert(Two()), t.randn(4, 8), []

    def pack(value):
        packed.append(1)
        return value.clone()

    t(m, x)
    with saved_tensors_hooks(pack, lambda value: value):
        out = t(m, x)
    t.backward(out)
    t.see("packed", bool(packed))


@case
def saved_on_the_cpu(t: Run):
    m, x = t.convert(Two()), t.randn(4, 8)
    with save_on_cpu():
        out = t(m, x)
    t.backward(out)


@case
def multithreading_off(t: Run):
    m, x = t.convert(Two()), t.randn(4, 8)
    with torch.autograd.set_multithreading_enabled(False):
        t.backward(t(m, x))
