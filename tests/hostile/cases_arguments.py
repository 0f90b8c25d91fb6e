"""Arguments: starred, by keyword, by default, callables, modules, constants."""

from __future__ import annotations

import torch
from torch.utils import _pytree as pytree

from tests.hostile.harness import Cases, Run
from tests.hostile.models import net

CASES = case = Cases("arguments")


@case
def starred(t: Run):
    m = t.convert(net(lambda s, *xs: s.l(xs[-1]) * len(xs)))
    t(m, t.randn(4, 8))
    t(m, t.randn(4, 8), t.randn(4, 8))
    t(m, 3, None, t.randn(4, 8))


@case
def double_starred(t: Run):
    m = t.convert(net(lambda s, x, **k: s.l(x) * k.get("scale", 1) + sum(k.get("more", []))))
    x = t.randn(4, 8)
    t(m, x)
    t(m, x, scale=3)
    t(m, x, more=[1, 2], other=x)


@case
def all_kinds_of_parameters(t: Run):
    def forward(s, a, /, b, *rest, c=2.0, d, **more):
        return s.l(a) + b * c + d, rest, sorted(more)

    m, x = t.convert(net(forward)), t.randn(4, 8)
    t(m, x, 1.0, d=t.randn(8))
    t(m, x, 1.0, 5, "z", d=t.randn(8), c=3.0, e=4)
    t(m, x, b=t.randn(8), d=0)


@case
def tensor_or_none(t: Run):
    m, x = t.convert(net(lambda s, x, mask=None: s.l(x) if mask is None else s.l(x) * mask)), t.randn(4, 8)
    for mask in (None, t.randn(4, 8), 2.0, None):
        t(m, x, mask)
        t(m, x, mask=mask)


@case
def strings_and_numbers(t: Run):
    def forward(s, x, reduction="mean", scale=1.0, flag=False):
        h = s.l(x) * scale
        return (h.mean() if reduction == "mean" else h.sum()) * (2 if flag else 1)

    m, x = t.convert(net(forward)), t.randn(4, 8)
    t(m, x)
    t(m, x, "sum")
    t(m, x, "mean", 2, flag=True)
    t(m, x, reduction="sum", scale=0.5)


@case
def a_callable_as_argument(t: Run):
    k = [2.0]
    m, x = t.convert(net(lambda s, x, f: f(s.l(x)))), t.randn(4, 8)
    t(m, x, torch.relu)
    t(m, x, lambda x: x * k[0])
    k[0] = 5.0
    t(m, x, lambda x: x * k[0])


@case
def a_module_as_argument(t: Run):
    m, x = t.convert(net(lambda s, x, head: head(s.l(x)))), t.randn(4, 8)
    heads = [t.wide(torch.nn.Linear(8, 3)) for _ in range(2)]
    for head in (*heads, heads[0]):
        t.backward(t(m, x, head))
    t.watch("heads", heads)


@case
def the_model_as_its_argument(t: Run):
    m, x = t.convert(net(lambda s, x, other: s.l(x) + other.l(x))), t.randn(4, 8)
    t(m, x, m)


@case
def registered_class(t: Run):
    class Graph:
        def __init__(self, nodes):
            self.nodes = nodes

    pytree.register_pytree_node(Graph, lambda g: ([g.nodes], None), lambda nodes, _: Graph(*nodes))
    t.defer(lambda: pytree._deregister_pytree_node(Graph))
    t.backward(t(t.convert(net(lambda s, g: Graph(s.l(g.nodes)))), Graph(t.randn(4, 8))).nodes)


@case
def nothing_out(t: Run):
    def forward(s, x, out):
        out.append(s.l(x))

    m, out = t.convert(net(forward)), []
    t(m, t.randn(4, 8), out)
    t.see("out", out)


@case
def constants_out(t: Run):
    t(t.convert(net(lambda s, x: (s.l(x), 3, "a", None, 2.0, True, x.shape, x.dtype, torch.Size([1])))), t.randn(4, 8))


@case
def shape_of_an_input_out(t: Run):
    m = t.convert(net(lambda s, x: (s.l(x), x.shape[0], x.numel() / 2)))
    for n in (4, 3, 5):
        t(m, t.randn(n, 8))
