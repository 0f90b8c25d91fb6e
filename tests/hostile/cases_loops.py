"""Loops, generators, iteration over children and parameters."""

from __future__ import annotations

import itertools

import torch
from torch import nn

from tests.hostile.harness import Cases, Run
from tests.hostile.models import Two, again, net

CASES = case = Cases("loops")


@case
def loop_over_rows(t: Run):
    m = t.convert(net(lambda s, x: torch.stack([s.l(row) for row in x])))
    for n in (3, 2, 4):
        t.backward(t(m, t.randn(n, 8)))


@case
def loop_until_a_value(t: Run):
    def forward(s, x):
        steps = 0
        while x.detach().abs().max() > 1 and steps < 5:
            x = x / 2
            steps += 1
        return s.l(x), steps

    m, x = t.convert(net(forward)), t.randn(4, 8)
    for scale in (1, 8, 0.01):
        t(m, x * scale)


@case
def loop_with_a_number(t: Run):
    def forward(s, x, n):
        for _ in range(n):
            x = torch.tanh(s.l(x))
        return x

    m, x = t.convert(net(forward)), t.randn(4, 8)
    for n in (1, 3, 0, 2, 3):
        t(m, x, n)


@case
def loop_with_break_and_else(t: Run):
    def forward(s, x):
        for k in s.steps:
            if k > 2:
                break
            x = s.l(x) + k
        else:
            x = -x
        return s.r(x)

    t.changes(net(forward, Two, steps=[1, 2, 3]), lambda m: m.steps.pop(), lambda m: m.steps.append(5))


@case
def generator_inside(t: Run):
    def rows(s, x):
        for k in range(3):
            yield s.l(x) * k

    t.changes(net(lambda s, x: sum(rows(s, x))), again)


@case
def generator_forward(t: Run):
    def forward(s, x):
        for k in range(3):
            x = s.l(x)
            yield x * k

    m, x = t.convert(net(forward)), t.randn(4, 8)
    t(lambda x: list(m(x)), x)
    t.backward(t(lambda x: list(m(x)), x))


@case
def generator_that_is_left(t: Run):
    closed = []

    def forward(s, x):
        try:
            while True:
                x = s.l(x)
                yield x
        finally:
            closed.append(1)

    m, x = t.convert(net(forward)), t.randn(4, 8)

    def two(x):
        rows = m(x)
        out = [next(rows), next(rows)]
        rows.close()
        return out

    t.backward(t(two, x))
    t.see("closed", closed)


@case
def comprehension_over_children(t: Run):
    m = net(lambda s, x: torch.cat([head(s.l(x)) for head in s.heads], -1))
    m.heads = nn.ModuleList(nn.Linear(8, n) for n in (2, 3))
    t.changes(m, lambda m: m.heads.append(t.wide(nn.Linear(8, 1))))


@case
def children_by_name(t: Run):
    def forward(s, x, which="a"):
        return s.heads[which](s.l(x))

    m = net(forward)
    m.heads = nn.ModuleDict({"a": nn.Linear(8, 2), "b": nn.Linear(8, 3)})
    m, x = t.convert(m), t.randn(4, 8)
    for which in ("a", "b", "a"):
        t.backward(t(m, x, which))
    t.raises(KeyError, m, x, "c")


@case
def parameters_that_are_iterated(t: Run):
    def forward(s, x):
        norm = sum(p.square().sum() for p in s.parameters())
        return s.l(x) / norm.sqrt(), sum(p.numel() for _, p in s.named_parameters() if p.requires_grad)

    t.changes(net(forward), lambda m: m.l.bias.requires_grad_(False))


@case
def parameter_list(t: Run):
    def forward(s, x):
        for w in s.weights:
            x = torch.tanh(x @ w)
        return s.l(x)

    m = net(forward)
    m.weights = nn.ParameterList(nn.Parameter(torch.randn(8, 8)) for _ in range(2))
    t.changes(m, lambda m: m.weights.append(nn.Parameter(t.randn(8, 8))))


@case
def parameter_dict(t: Run):
    m = net(lambda s, x: s.l(x) @ s.weights["a"] + s.weights["b"])
    m.weights = nn.ParameterDict({"a": nn.Parameter(torch.randn(8, 8)), "b": nn.Parameter(torch.randn(8))})
    t.changes(m, lambda m: m.weights.update({"b": nn.Parameter(t.randn(8))}))


@case
def fixed_point(t: Run):
    def forward(s, x):
        z = torch.zeros_like(x)
        with torch.no_grad():
            for _ in range(3):
                z = torch.tanh(s.l(z) + x).to(x.dtype)
        return torch.tanh(s.l(z) + x)

    t.changes(net(forward), again)


@case
def many_lengths(t: Run):
    m = t.convert(Two())
    for n in itertools.chain(range(1, 12), (1, 0)):
        t(m, t.randn(n, 8))
