"""Exceptions from a forward, and the model right after them."""

from __future__ import annotations

import contextlib
import os
import tempfile

import torch
from torch import nn

from tests.hostile.harness import Cases, Run
from tests.hostile.models import Net, Two, net

CASES = case = Cases("errors")


class Stop(BaseException):
    """As KeyboardInterrupt: no Exception."""


@case
def wrong_shape_and_again(t: Run):
    m = t.convert(Two())
    t.raises(RuntimeError, m, t.randn(4, 7))
    t.backward(t(m, t.randn(4, 8)))
    t.raises(RuntimeError, m, t.randn(4, 7))
    t.backward(t(m, t.randn(4, 8)))


@case
def wrong_shape_after_a_call(t: Run):
    m = t.convert(Two())
    t(m, t.randn(4, 8))
    t.raises(RuntimeError, m, t.randn(4, 7))
    t.backward(t(m, t.randn(4, 8)))


@case
def wrong_arguments(t: Run):
    m, x = t.convert(Two()), t.randn(4, 8)
    t.raises(TypeError, m)
    t.raises(TypeError, m, x, 1)
    t.raises(TypeError, m, x, y=1)
    t(m, x)
    t.raises(TypeError, m, y=x)
    t(m, x)


@case
def wrong_kinds(t: Run):
    m, x = t.convert(Two()), t.randn(4, 8)
    t.raises(TypeError, m, "x")
    t.raises(TypeError, m, None)
    t(m, x)
    t.raises(TypeError, m, [1.0])
    t(m, x)


@case
def raised_by_a_condition(t: Run):
    def forward(s, x):
        if x.shape[0] > 4:
            raise ValueError("too many rows")
        return s.l(x)

    m = t.convert(net(forward))
    for n in (4, 5, 3, 5, 4):
        if n > 4:
            t.raises(ValueError, m, t.randn(n, 8))
        else:
            t.backward(t(m, t.randn(n, 8)))


@case
def raised_on_the_first_call(t: Run):
    calls = []

    def forward(s, x):
        calls.append(1)
        if len(calls) == 1:
            raise ValueError("not yet")
        return s.l(x)

    m, x = t.convert(net(forward)), t.randn(4, 8)
    t.raises(ValueError, m, x)
    t.backward(t(m, x))
    t.backward(t(m, x))
    t.see("calls", calls)


@case
def raised_on_a_value(t: Run):
    def forward(s, x):
        h = s.l(x)
        if not torch.isfinite(h).all():
            raise FloatingPointError("not finite")
        return h

    m, x = t.convert(net(forward)), t.randn(4, 8)
    t(m, x)
    t.raises(FloatingPointError, m, x * float("inf"))
    t.backward(t(m, x))


@case
def raised_after_a_write(t: Run):
    def forward(s, x):
        s.seen += 1
        h = s.l(x)
        s.total.add_(1)
        if s.seen == 2:
            raise ValueError("second")
        return h + s.total

    m = net(forward, seen=0)
    m.register_buffer("total", torch.zeros(8))
    m, x = t.convert(m), t.randn(4, 8)
    t(m, x)
    t.raises(ValueError, m, x)
    t.backward(t(m, x))


@case
def caught_inside(t: Run):
    def forward(s, x):
        try:
            return s.l(x @ x)
        except RuntimeError:
            return s.l(x)

    t.changes(net(forward))


@case
def caught_by_key(t: Run):
    def forward(s, batch):
        try:
            scale = batch["scale"]
        except KeyError:
            scale = 1.0
        return s.l(batch["x"]) * scale

    m, x = t.convert(net(forward)), t.randn(4, 8)
    t(m, {"x": x})
    t(m, {"x": x, "scale": 3.0})
    t(m, {"x": x})


@case
def finally_runs(t: Run):
    log = []

    def forward(s, x):
        try:
            if x.shape[0] == 3:
                raise ValueError
            return s.l(x)
        finally:
            log.append(x.shape[0])

    m = t.convert(net(forward))
    t(m, t.randn(4, 8))
    t.raises(ValueError, m, t.randn(3, 8))
    t(m, t.randn(4, 8))
    t.see("log", log)


@case
def not_an_exception(t: Run):
    state = {"stop": False}

    def forward(s, x):
        h = s.l(x)
        if state["stop"]:
            raise Stop
        return h

    m, x = t.convert(net(forward)), t.randn(4, 8)
    t(m, x)
    state["stop"] = True
    t.raises(Stop, m, x)
    state["stop"] = False
    t.backward(t(m, x))


@case
def interrupt_while_it_is_captured(t: Run):
    """It comes once, as from outside: what a trace writes to Python's state would be undone."""
    interrupt = tempfile.NamedTemporaryFile()
    t.defer(interrupt.close)

    class Interrupting(nn.Linear):
        def forward(self, x):
            if not os.path.getsize(interrupt.name):
                interrupt.write(b"x")
                interrupt.flush()
                raise Stop
            return super().forward(x)

    m, x = Net(), t.randn(4, 8)
    m.l = t.wide(Interrupting(8, 8))
    for _ in range(3):
        with contextlib.suppress(Stop):
            if not t.ours or not hasattr(m, "_fxprec"):  # refused: as it was
                t.convert(m, name="m")
            m(x)
    t.backward(t(m, x))


@case
def stop_iteration(t: Run):
    rows = iter([1.0, 2.0])
    m, x = t.convert(net(lambda s, x: s.l(x) * next(rows))), t.randn(4, 8)
    t(m, x)
    t(m, x)
    t.raises(StopIteration, m, x)
    rows = iter([3.0])
    t(m, x)


@case
def not_implemented(t: Run):
    class M(Net):
        def forward(self, x):
            raise NotImplementedError("later")

    m, x = M(), t.randn(4, 8)
    t.convert(m)
    t.raises(NotImplementedError, m, x)
    M.forward = Net.forward
    t(m, x)


@case
def attribute_is_missing(t: Run):
    m, x = t.convert(net(lambda s, x: s.head(s.l(x)))), t.randn(4, 8)
    t.raises(AttributeError, m, x)
    m.head = t.wide(nn.Linear(8, 3))
    t.backward(t(m, x))


@case
def name_is_missing(t: Run):
    def forward(s, x):
        return s.l(x) * scale

    m, x = t.convert(net(forward)), t.randn(4, 8)
    t.raises(NameError, m, x)
    scale = 3.0
    t(m, x)


@case
def assertion(t: Run):
    def forward(s, x):
        assert x.shape[-1] == s.width, "width"
        return s.l(x)

    m, x = t.convert(net(forward, width=8)), t.randn(4, 8)
    t(m, x)
    m.width = 9
    t.raises(AssertionError, m, x)
    m.width = 8
    t.backward(t(m, x))


@case
def error_in_the_backward(t: Run):
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1

        @staticmethod
        def backward(ctx, g):
            if fails:
                raise ValueError("no way back")
            return g

    fails = [1]
    m, x = t.convert(net(lambda s, x: s.r(Fails.apply(s.l(x))), Two)), t.randn(4, 8)
    out = t(m, x)
    t.raises(ValueError, lambda: t.backward(out))
    m.zero_grad()
    fails.clear()
    t.backward(t(m, x))


@case
def backward_twice_without_a_graph(t: Run):
    m, x = t.convert(Two()), t.randn(4, 8)
    out = t(m, x)
    t.backward(out)
    t.raises(RuntimeError, lambda: t.backward(out))
    t.backward(t(m, x))


@case
def index_out_of_range(t: Run):
    m = t.convert(nn.Sequential(nn.Embedding(4, 8), nn.Linear(8, 3)))
    t(m, torch.tensor([0, 1]))
    t.raises(IndexError, m, torch.tensor([0, 9]))
    t.backward(t(m, torch.tensor([3, 1])))


@case
def write_to_a_leaf(t: Run):
    m, x = t.convert(net(lambda s, x: s.l(x.mul_(2)))), t.randn(4, 8)
    t.raises(RuntimeError, m, x.clone().requires_grad_())
    t.backward(t(m, x))


@case
def system_exit(t: Run):
    def forward(s, x):
        if s.leave:
            raise SystemExit(3)
        return s.l(x)

    m, x = t.convert(net(forward, leave=False)), t.randn(4, 8)
    t(m, x)
    m.leave = True
    t.raises(SystemExit, m, x)
    m.leave = False
    t(m, x)
