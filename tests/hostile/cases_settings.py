"""The ways of convert and of what goes with it, in hostile order: example inputs, freeze, accumulate, wrappers."""

from __future__ import annotations

import copy

import torch
from torch import nn

import fxprec
from tests.hostile.harness import Cases, Run
from tests.hostile.models import Net, Two, again, net

CASES = case = Cases("settings")


def counting(s, x):
    s.calls += 1
    s.total.add_(1)
    return s.l(x) * s.total


def counter():
    m = net(counting, calls=0)
    m.register_buffer("total", torch.zeros(8))
    return m


@case
def example_inputs(t: Run):
    x = t.randn(4, 8)
    m = t.convert(Two(), example_inputs=(x.float(),))
    t.backward(t(m, x))
    t.backward(t(m, t.randn(3, 8)))


@case
def example_inputs_by_name(t: Run):
    x = t.randn(4, 8)
    m = t.convert(Two(), example_inputs={"x": x.float()})
    t.backward(t(m, x=x))


@case
def example_inputs_leave_no_trace(t: Run):
    """Buffers, random states and the state in Python are as if convert had not run the forward."""
    x = t.randn(4, 8)
    m = t.convert(counter(), example_inputs=(x.float(),))
    t.see("calls", (m.calls, m.total))
    t(m, x)
    t(m, x)


@case
def example_inputs_are_not_written(t: Run):
    x = t.randn(4, 8)
    m = t.convert(net(lambda s, x: s.l(x.mul_(2))), example_inputs=(x,))
    t.see("x", x)
    t(m, x)


@case(no_twin="float64 draws another mask")
def example_inputs_and_dropout(t: Run):
    x = t.randn(4, 8)
    m = t.convert(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)), example_inputs=(x,))
    t.backward(t(m, x))


@case
def casts_as_autocast_has_them(t: Run):
    t.changes(Two(), again, placement="autocast")


@case
def regions_op_by_op(t: Run):
    t.changes(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 8)), again, fuse="aten")


@case
def nothing_fused(t: Run):
    t.changes(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 8)), again, fuse=False)


@case(wide="level O0 lowers nothing")
def level_that_lowers_nothing(t: Run):
    t.changes(Two(), again, level="O0")


@case
def residual_stream_low(t: Run):
    def forward(s, x):
        x = x + s.l(x)
        return x + s.r(torch.relu(x))

    t.changes(net(forward, Two), again, level="O2")


@case
def accumulated(t: Run):
    m = t.convert(Two())
    optimizer = torch.optim.SGD(m.parameters(), lr=0.1)
    for _ in range(2):
        if t.ours:
            with fxprec.accumulate(m):
                for _ in range(2):
                    t.backward(t(m, t.randn(4, 8)))
        else:
            for _ in range(2):
                t.backward(t(m, t.randn(4, 8)))
        optimizer.step()
        optimizer.zero_grad()


@case
def frozen(t: Run):
    m, x = t.convert(Two(), watch=False), t.randn(4, 8)
    m.eval().requires_grad_(False)
    t(m, x)
    if t.ours:
        fxprec.freeze(m)
    t(m, x)
    t(m, t.randn(3, 8))


@case
def looked_at_in_between(t: Run):
    m, x = t.convert(counter()), t.randn(4, 8)
    for _ in range(2):
        t(m, x)
        if t.ours:
            str(fxprec.report(m))
            fxprec.graphs(m)
            str(fxprec.explain(m, "l"))


@case
def scaler_of_float16(t: Run):
    """A loss scale that is a power of two changes nothing but the exponents."""
    m, x = t.convert(Two()), t.randn(4, 8)
    out = t(m, x)
    (out.square().sum() * 1024).backward()
    with torch.no_grad():
        for p in m.parameters():
            p.grad /= 1024
    t(m, x)


@case
def compiled_outside(t: Run):
    m, x = t.convert(Two()), t.randn(4, 8)
    outer = torch.compile(m, backend="eager")
    t.backward(t(outer, x))
    t.backward(t(m, x))


@case
def compiled_around(t: Run):
    m, x = t.convert(Two()), t.randn(4, 8)

    @torch.compile(backend="eager")
    def step(x):
        return torch.relu(m(x * 2)) + 1

    t.backward(t(step, x))
    t.backward(t(step, t.randn(3, 8)))


@case
def compiled_in_place(t: Run):
    m, x = t.convert(Two()), t.randn(4, 8)
    m.compile(backend="eager")
    t.backward(t(m, x))
    t(m.eval(), x)


@case
def data_parallel(t: Run):
    """Without devices it is a wrapper that calls the module."""
    m, x = t.convert(Two()), t.randn(4, 8)
    t.backward(t(nn.DataParallel(m), x))


@case
def called_under_autocast(t: Run):
    m, x = t.convert(Two()), t.randn(4, 8)
    with torch.autocast("cpu", torch.bfloat16, enabled=t.ours or t.variant == "autocast"):
        out = m(x)
    t.see("dtype", t.variant == "autocast" or out.dtype is x.dtype)
    t.backward(t(m, x))


@case
def converted_twice_is_refused(t: Run):
    m, x = t.convert(Two()), t.randn(4, 8)
    if t.ours:
        t.raises(fxprec.ConversionError, fxprec.convert, m)
    else:
        t.see("error0", "ConversionError")
    t.backward(t(m, x))


@case
def part_of_it_is_converted(t: Run):
    m, x = Two(), t.randn(4, 8)
    t.wide(m)
    m.l = t.convert(nn.Sequential(nn.Linear(8, 8), nn.ReLU()))
    m.r = t.convert(m.r)
    t.watch("whole", m)
    t.backward(t(m, x))
    t.see("keys", list(m.state_dict()))


@case
def copied_reverted_converted(t: Run):
    m, x = t.convert(Two()), t.randn(4, 8)
    t(m, x)
    twin = copy.deepcopy(m)
    if t.ours:
        fxprec.revert(twin)
        twin.l = nn.Linear(8, 8)
        fxprec.convert(twin, dtype=torch.bfloat16, capture=t.variant)
    else:
        twin.l = t.wide(nn.Linear(8, 8))
    t.watch("twin", twin)
    t.backward(t(twin, x))
    t.backward(t(m, x))


@case
def graph_module_is_called(t: Run):
    m, x = t.convert(Two()), t.randn(4, 8)
    t(m, x)
    graph = fxprec.graph_module(m) if t.ours else m
    t.backward(t(graph, x))
    t.backward(t(copy.deepcopy(graph), x))


@case
def scheduler_and_momentum(t: Run):
    m = t.convert(Two())
    optimizer = torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    for _ in range(3):
        optimizer.zero_grad()
        t.backward(t(m, t.randn(4, 8)))
        optimizer.step()
        scheduler.step()


@case
def optimizer_with_a_closure(t: Run):
    """Its line search calls the model many times within a step."""
    m, x = t.convert(Net()), t.randn(4, 8)
    optimizer = torch.optim.LBFGS(m.parameters(), lr=0.01, max_iter=2)
    calls = []

    def closure():
        optimizer.zero_grad()
        calls.append(1)
        loss = t.quiet(m, x).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)
    t.see("calls", len(calls))
    t(m, x)


@case
def optimizer_state_is_loaded(t: Run):
    m = t.convert(Two())
    optimizer = torch.optim.Adam(m.parameters(), lr=0.01)
    t.backward(t(m, t.randn(4, 8)))
    optimizer.step()
    kept = copy.deepcopy((m.state_dict(), optimizer.state_dict()))
    t.backward(t(m, t.randn(4, 8)))
    optimizer.step()
    m.load_state_dict(kept[0])
    optimizer.load_state_dict(kept[1])
    t(m, t.randn(4, 8))


@case
def steps_by_foreach_ops(t: Run):
    m, x = t.convert(Two()), t.randn(4, 8)
    for _ in range(2):
        t.backward(t(m, x))
        with torch.no_grad():
            torch._foreach_add_(list(m.parameters()), [p.grad for p in m.parameters()], alpha=-0.1)
        m.zero_grad()
    with torch.no_grad():
        t(m, x)
