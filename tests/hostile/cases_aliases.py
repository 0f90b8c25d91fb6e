"""Memory that has several names: inputs, buffers, parameters, views; and writes through one of them."""

from __future__ import annotations

import torch

from tests.hostile.harness import Cases, Run
from tests.hostile.models import net

CASES = case = Cases("aliases")


def writes_between(s, a, b):
    h = s.l(b)
    a.mul_(2)
    return s.l(b) - h


@case
def one_input_twice(t: Run):
    m, x = t.convert(net(writes_between)), t.randn(4, 8)
    t(m, x, x)


@case
def one_input_twice_after_two_inputs(t: Run):
    m, x = t.convert(net(writes_between)), t.randn(4, 8)
    t(m, t.randn(4, 8), t.randn(4, 8))
    t(m, x, x)
    t(m, t.randn(4, 8), t.randn(4, 8))


@case
def input_and_its_view(t: Run):
    m, x = t.convert(net(writes_between)), t.randn(4, 8)
    t(m, x.view(8, 4), x)
    t(m, x, x.view(4, 8))


@case
def input_and_its_transpose(t: Run):
    m, x = t.convert(net(writes_between)), t.randn(8, 8)
    t(m, x.t(), x)


@case
def overlapping_slices(t: Run):
    m, x = t.convert(net(writes_between)), t.randn(6, 8)
    t(m, x[:4], x[2:])
    t(m, x[:3], x[3:])


@case
def detached_input(t: Run):
    m, x = t.convert(net(writes_between)), t.randn(4, 8)
    t(m, x.detach(), x)


@case
def inputs_in_a_list(t: Run):
    def forward(s, xs):
        h = s.l(xs[1])
        xs[0].mul_(2)
        return s.l(xs[1]) - h

    m, x = t.convert(net(forward)), t.randn(4, 8)
    t(m, [x, x])
    t(m, [x, t.randn(4, 8)])


@case
def inputs_in_a_dict(t: Run):
    def forward(s, batch):
        h = s.l(batch["b"])
        batch["a"].mul_(2)
        return s.l(batch["b"]) - h

    m, x = t.convert(net(forward)), t.randn(4, 8)
    t(m, {"a": x, "b": x})


@case
def two_buffers_that_are_one(t: Run):
    def forward(s, x):
        h = s.l(x + s.a)
        s.b.add_(1)
        return s.l(x + s.a) - h

    m = net(forward)
    m.register_buffer("a", t.wide(torch.ones(8)))
    m.register_buffer("b", m.a)
    m, x = t.convert(m), t.randn(4, 8)
    t(m, x)
    t(m, x)


@case
def buffer_and_its_view(t: Run):
    def forward(s, x):
        h = torch.mm(x, s.a)
        s.b.mul_(3)
        return torch.mm(x, s.a) - h + s.l(x)

    m = net(forward)
    m.register_buffer("a", t.randn(8, 8))
    m.register_buffer("b", m.a[2:])
    m, x = t.convert(m), t.randn(4, 8)
    t(m, x)
    t(m, x)


@case
def buffer_given_as_input(t: Run):
    def forward(s, x):
        h = torch.mm(x, s.a)
        s.a.mul_(2)
        return torch.mm(x, s.a) - h + s.l(x)

    m = net(forward)
    m.register_buffer("a", torch.randn(8, 8))
    m = t.convert(m)
    t(m, m.a)
    t(m, t.randn(4, 8))


@case
def buffer_aliased_after_conversion(t: Run):
    def forward(s, x):
        h = torch.mm(x, s.a)
        s.b.mul_(2)
        return torch.mm(x, s.a) - h + s.l(x)

    m = net(forward)
    m.register_buffer("a", torch.randn(8, 8))
    m.register_buffer("b", torch.randn(8, 8))
    m, x = t.convert(m), t.randn(4, 8)
    t(m, x)
    m.b = m.a
    t(m, x)


@case
def plain_tensor_attribute_of_a_buffer(t: Run):
    def forward(s, x):
        h = torch.mm(x, s.a)
        s.kept[0].mul_(2)
        return torch.mm(x, s.a) - h + s.l(x)

    m = net(forward)
    m.register_buffer("a", t.randn(8, 8))
    m.kept = [m.a]
    m, x = t.convert(m), t.randn(4, 8)
    t(m, x)
    t(m, x)


@case
def parameter_written_between(t: Run):
    def forward(s, x):
        h = s.l(x)
        with torch.no_grad():
            s.l.weight.mul_(2)
        return s.l(x) - h

    m, x = t.convert(net(forward)), t.randn(4, 8)
    with torch.no_grad():
        t(m, x)
        t(m, x)


@case
def parameter_written_through_data(t: Run):
    def forward(s, x):
        s.l.weight.data.mul_(2)
        return s.l(x)

    m, x = t.convert(net(forward)), t.randn(4, 8)
    t(m, x)
    t(m, x)


@case
def weight_given_as_input(t: Run):
    m = t.convert(net(lambda s, x: s.l(x) + torch.mm(x, s.l.weight)))
    t.backward(t(m, m.l.weight))
    t.backward(t(m, t.randn(4, 8)))


@case
def input_written_in_place(t: Run):
    m = t.convert(net(lambda s, x: s.l(x.mul_(2)) + x))
    t(m, t.randn(4, 8))
    t(m, t.randn(3, 8))


@case
def input_written_after_its_use(t: Run):
    def forward(s, x):
        h = s.l(x)
        x.zero_()
        return h, s.l(x)

    t(t.convert(net(forward)), t.randn(4, 8))


@case
def input_returned(t: Run):
    m = t.convert(net(lambda s, x: (x, s.l(x), x)))
    t(m, t.randn(4, 8))
