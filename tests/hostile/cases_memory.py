"""Memory that inputs, buffers and parameters share in further ways, and what else writes to it."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.hostile.harness import Cases, Run
from tests.hostile.models import net

CASES = case = Cases("memory")


@torch.library.custom_op("hostile::double", mutates_args=("x",))
def double(x: torch.Tensor) -> None:
    x.mul_(2)


def writes_between(s, a, b):
    h = s.l(b)
    a.mul_(2)
    return s.l(b) - h


def writes_buffer(s, x):
    h = torch.mm(x, s.a)
    s.b.mul_(2)
    return torch.mm(x, s.a) - h + s.l(x)


def with_buffers(t: Run, forward, share):
    """A net with a buffer ``a`` and a buffer ``b`` that is made of it."""
    m = net(forward)
    m.register_buffer("a", t.randn(8, 8))
    m.register_buffer("b", share(m.a))
    return t.convert(m)


@case
def expanded(t: Run):
    m, x = t.convert(net(writes_between)), t.randn(1, 8)
    t(m, x, x.expand(4, 8))


@case
def numpy_arrays_that_overlap(t: Run):
    m, array = t.convert(net(writes_between)), t.randn(6, 8).numpy()
    t(m, torch.from_numpy(array[:4]), torch.from_numpy(array[2:]))


@case
def apart_in_one_storage(t: Run):
    m, x = t.convert(net(writes_between)), t.randn(8, 8)
    t(m, x[:4], x[4:])
    t(m, x[::2], x[1::2])


@case
def one_way_and_back(t: Run):
    m, x = t.convert(net(writes_between)), t.randn(4, 8)
    for a, b in ((t.randn(4, 8), x), (x.view(-1), x), (t.randn(4, 8), x), (x[1:], x), (x, t.randn(4, 8))):
        t(m, a, b)


@case
def many_ways(t: Run):
    def forward(s, a, b, c, d):
        h = s.l(b) + s.l(c) + s.l(d)
        a.view(-1).add_(1)
        c.mul_(2)
        return s.l(b) + s.l(c) + s.l(d) - h

    m = t.convert(net(forward))
    for number in range(16):
        x, others = t.randn(4, 8), t.randn(4, 4, 8)
        t(m, *[x.view(4, 8) if number >> place & 1 else others[place] for place in range(4)])


@case
def views_in_a_list(t: Run):
    def forward(s, xs):
        h = s.l(xs[1])
        xs[0].mul_(2)
        return s.l(xs[1]) - h

    m, x = t.convert(net(forward)), t.randn(4, 8)
    t(m, [t.randn(4, 8), x])
    t(m, [x.view(-1), x])
    t(m, [x[2], x])


@case
def bits_of_a_float(t: Run):
    def forward(s, a, b):
        h = s.l(b)
        a.zero_()
        return h, s.l(b)

    m, x = t.convert(net(forward)), t.randn(4, 8)
    t(m, x.view(torch.uint8), x)


@case
def real_part_of_complex(t: Run):
    m = t.convert(net(lambda s, a, b: (s.l(b[..., 0]), a.mul_(2), s.l(b[..., 0]))))
    a = torch.view_as_complex(t.randn(4, 8, 2))
    t(m, a, torch.view_as_real(a))


@case
def item_is_set(t: Run):
    def forward(s, a, b):
        h = s.l(b)
        a[0] = 3.0
        a[1:, 2:4] += 1
        return s.l(b) - h

    m, x = t.convert(net(forward)), t.randn(4, 8)
    t(m, x.view(4, 8), x)


@case
def copied_into(t: Run):
    def forward(s, a, b, c):
        h = s.l(b)
        a.copy_(c)
        return s.l(b) - h + s.l(c)

    m, x = t.convert(net(forward)), t.randn(4, 8)
    t(m, x[:], x, t.randn(4, 8))
    t(m, x[:], x, x.view(4, 8))


@case
def out_is_an_input(t: Run):
    def forward(s, a, b):
        h = s.l(b)
        torch.add(b, 1, out=a)
        return s.l(b) - h

    m, x = t.convert(net(forward)), t.randn(4, 8)
    t(m, x.view(4, 8), x)


@case
def written_without_gradients(t: Run):
    def forward(s, a, b):
        h = s.l(b)
        with torch.no_grad():
            a.mul_(2)
        return s.l(b) - h

    m, x = t.convert(net(forward)), t.randn(4, 8)
    with torch.no_grad():
        t(m, x.view(4, 8), x)


@case
def gradients_through_a_write(t: Run):
    def forward(s, a, b):
        h = torch.relu(b)
        a.mul_(2)
        return s.l(b) + s.l(b) * h.sum()

    m, leaf = t.convert(net(forward)), t.randn(4, 8).requires_grad_()
    x = leaf * 1
    t.backward(t(m, x.view(-1), x))
    t.see("gradient", leaf.grad)


@case
def under_inference_mode(t: Run):
    m, x = t.convert(net(writes_between)), t.randn(4, 8)
    with torch.inference_mode():
        t(m, x.clone(), x)
        y = x.clone()
        t(m, y.view(-1), y)


@case
def broadcast_together(t: Run):
    def forward(s, a, b):
        _, wide = torch.broadcast_tensors(a, b)
        h = s.l(b)
        wide.mul_(2)
        return s.l(b) - h

    m = t.convert(net(forward))
    t(m, t.randn(4, 8), t.randn(4, 8))


@case
def custom_op_writes(t: Run):
    def forward(s, a, b):
        h = s.l(b)
        torch.ops.hostile.double(a)
        return s.l(b) - h

    m, x = t.convert(net(forward)), t.randn(4, 8)
    with torch.no_grad():
        t(m, x.view(-1), x)
        t(m, x, t.randn(4, 8))


@case
def checkpointed_body_writes(t: Run):
    def forward(s, a, b):
        h = s.l(b)
        c = checkpoint(lambda x: x.mul_(2) + 1, a, use_reentrant=False)
        return s.l(b) - h, s.l(a), c

    m, x = t.convert(net(forward)), t.randn(4, 8)
    with torch.no_grad():
        t(m, x.view(4, 8), x)
        t(m, t.randn(4, 8), x)


@case
def buffer_that_is_a_view(t: Run):
    m, x = with_buffers(t, writes_buffer, lambda a: a.view(-1)), t.randn(4, 8)
    t(m, x)
    t(m, x)


@case
def buffer_that_becomes_a_view(t: Run):
    m, x = with_buffers(t, writes_buffer, torch.clone), t.randn(4, 8)
    t(m, x)
    m.b = m.a[3:]
    t(m, x)
    m.b = m.a.clone()
    t(m, x)


@case
def data_that_becomes_another_buffers(t: Run):
    m, x = with_buffers(t, writes_buffer, torch.clone), t.randn(4, 8)
    t(m, x)
    m.b.data = m.a.data
    t(m, x)


@case
def buffers_given_by_functional_call(t: Run):
    m, x = with_buffers(t, writes_buffer, torch.clone), t.randn(4, 8)
    t(m, x)
    one = t.randn(8, 8)
    t(lambda: torch.func.functional_call(m, {"a": one, "b": one.view(64)}, (x,)))
    t.see("one", one)


@case
def copy_of_a_model_that_shares(t: Run):
    m, x = with_buffers(t, writes_buffer, lambda a: a.view(-1)), t.randn(4, 8)
    t(m, x)
    twin = copy.deepcopy(m)
    t(twin, x)
    t.see("twin", twin.state_dict())


@case
def view_of_a_buffer_as_input(t: Run):
    m = with_buffers(t, writes_buffer, torch.clone)
    t(m, m.b[2:6])
    t(m, t.randn(4, 8))


@case
def running_mean_as_input(t: Run):
    m = net(lambda s, x, r: s.l(r) - s.l(s.n(x)) * s.l(r))
    m.n = nn.BatchNorm1d(8)
    m = t.convert(m)
    for _ in range(2):
        t(m, t.randn(4, 8), m.n.running_mean)
    m.eval()
    t(m, t.randn(4, 8), m.n.running_mean)


@case
def running_mean_as_weight(t: Run):
    def forward(s, x):
        h = F.linear(x, s.n.running_mean[None])
        return F.linear(s.n(x), s.n.running_mean[None]) + h + s.l(x)

    m = net(forward)
    m.n = nn.BatchNorm1d(8)
    m = t.convert(m)
    t(m, t.randn(4, 8))
    t(m, t.randn(4, 8))


@case
def buffer_over_a_weight(t: Run):
    def forward(s, x):
        h = s.l(x)
        s.b.mul_(1.5)
        return s.l(x) - h

    m = t.wide(net(forward))
    m.register_buffer("b", m.l.weight.data[2:])
    m, x = t.convert(m), t.randn(4, 8)
    with torch.no_grad():
        t(m, x)
        t(m, x)


@case
def weights_over_one_storage(t: Run):
    m = t.wide(net(lambda s, x: s.l(x) + F.linear(x, s.w)))
    m.w = nn.Parameter(m.l.weight.data)
    m, x = t.convert(m), t.randn(4, 8)
    optimizer = torch.optim.SGD([m.l.weight], lr=0.1)
    for _ in range(2):
        t.backward(t(m, x))
        optimizer.step()
    with torch.no_grad():
        t(m, x)


@case
def weight_rescaled_by_a_lookup(t: Run):
    m = net(lambda s, i, x: (F.linear(x, s.e.weight), s.l(s.e(i)), F.linear(x, s.e.weight)))
    m.e = nn.Embedding(8, 8, max_norm=1.0)
    m, x = t.convert(m), t.randn(4, 8)
    with torch.no_grad():
        t(m, torch.tensor([1, 2, 3, 3]), x)
        t(m, torch.arange(4) + 4, x)


@case
def weight_written_before_a_break(t: Run):
    def forward(s, x):
        s.l.weight.data.mul_(2)
        h = torch.relu(x)
        torch._dynamo.graph_break()
        return s.l(h)

    m, x = t.convert(net(forward)), t.randn(4, 8)
    t(m, x)
    t(m, x)
