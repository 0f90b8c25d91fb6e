"""Views, outputs that share memory, tied weights, strides."""

from __future__ import annotations

import torch
from torch import nn

from tests.hostile.harness import Cases, Run
from tests.hostile.models import Net, Two, net

CASES = case = Cases("views")


def writes_between(s, a, b):
    h = s.l(b)
    a.mul_(2)
    return s.l(b) - h


@case
def view_of_the_input_returned(t: Run):
    m, x = t.convert(net(lambda s, x: (x[:2], x.view(-1), s.l(x)))), t.randn(4, 8)
    view, flat, _ = t(m, x)
    view.zero_()
    t.see("written", (x, flat))


@case
def output_twice(t: Run):
    def forward(s, x):
        h = s.l(x)
        return h, h, h.view(-1)

    a, b, flat = t(t.convert(net(forward)), t.randn(4, 8))
    with torch.no_grad():
        a.zero_()
    t.see("written", (b, flat))


@case
def buffer_returned(t: Run):
    def forward(s, x):
        s.total.add_(1)
        return s.l(x), s.total

    m = net(forward)
    m.register_buffer("total", torch.zeros(3))
    m, x = t.convert(m), t.randn(4, 8)
    _, total = t(m, x)
    t(m, x)
    t.see("total", total)
    total.zero_()
    t(m, x)


@case
def parameter_returned(t: Run):
    m = t.convert(net(lambda s, x: (s.l(x), s.l.weight)))
    _, weight = t(m, t.randn(4, 8))
    t.see("same", weight is m.l.weight)


@case
def in_place_on_a_view_of_a_product(t: Run):
    def forward(s, x):
        h = s.l(x)
        h[:, :4].mul_(2)
        h[0] = 1.0
        return s.r(h)

    m = t.convert(net(forward, Two))
    t.backward(t(m, t.randn(4, 8)))


@case
def in_place_through_a_chain_of_views(t: Run):
    def forward(s, x):
        h = s.l(x)
        v = h.view(2, 2, 8).transpose(0, 1)[0]
        v.add_(x[:2])
        return s.r(h) + v.sum()

    m = t.convert(net(forward, Two))
    t.backward(t(m, t.randn(4, 8)))


@case
def expanded_input(t: Run):
    m = t.convert(Two())
    t.backward(t(m, t.randn(1, 8).expand(4, 8)))


@case
def strided_input(t: Run):
    m = t.convert(Two())
    t(m, t.randn(8, 4).t())
    t(m, t.randn(8, 16)[::2, ::2])


@case
def tied_weights(t: Run):
    m = Two()
    m.r.weight = m.l.weight
    t.changes(m, lambda m: setattr(m.r, "weight", nn.Parameter(m.l.weight.detach() * 2)))


@case
def tied_after_conversion(t: Run):
    t.changes(Two(), lambda m: setattr(m.r, "weight", m.l.weight), lambda m: setattr(m, "r", m.l))


@case
def tied_to_a_transposed_view(t: Run):
    m = t.convert(net(lambda s, x: torch.mm(s.l(x), s.l.weight.t()) + torch.mm(s.l(x), s.l.weight)))
    t.backward(t(m, t.randn(4, 8)))


@case
def out_argument(t: Run):
    def forward(s, x, out):
        h = s.l(x)
        torch.add(h.detach(), 1, out=out)
        return h

    m, out = t.convert(net(forward)), t.randn(4, 8)
    t(m, t.randn(4, 8), out)


@case
def state_of_a_recurrent_cell_in_place(t: Run):
    def forward(s, x, state):
        state.copy_(torch.tanh(s.l(x) + state))
        return s.l(state)

    m, state = t.convert(net(forward)), t.randn(4, 8)
    with torch.no_grad():
        for _ in range(3):
            t(m, t.randn(4, 8), state)


@case
def model_applied_to_its_own_output(t: Run):
    m, x = t.convert(Net()), t.randn(4, 8)
    t.backward(t(lambda x: m(m(x) + x), x))
