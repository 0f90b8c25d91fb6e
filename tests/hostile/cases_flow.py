"""Control flow: on values, on shapes, loops, generators, context managers."""

from __future__ import annotations

import contextlib

import torch

from tests.hostile.harness import Cases, Run
from tests.hostile.models import Two, again, net

CASES = case = Cases("flow")


@case
def branch_on_a_value(t: Run):
    m = t.convert(net(lambda s, x: s.l(x) if x.sum() > 0 else -3 * s.r(x), Two))
    x = t.randn(4, 8).abs()
    for sign in (1, -1, 1, -1):
        t.backward(t(m, sign * x))


@case
def branch_on_a_product(t: Run):
    """Far from the border, where rounding would decide."""

    def forward(s, x):
        h = s.l(x)
        return s.r(h) if h.detach().abs().max() > 100 else h

    m, x = t.convert(net(forward, Two)), t.randn(4, 8)
    for scale in (1, 1000, 1):
        t.backward(t(m, x * scale))


@case
def branch_on_a_buffer(t: Run):
    m = net(lambda s, x: s.l(x) if s.on else -s.l(x))
    m.register_buffer("on", torch.tensor(True))
    t.changes(m, lambda m: m.on.fill_(False), lambda m: m.on.fill_(True))


@case
def branch_on_a_shape(t: Run):
    m = t.convert(net(lambda s, x: s.l(x) if x.shape[0] > 3 else s.r(x) * 2, Two))
    for n in (4, 3, 5, 1, 2):
        t.backward(t(m, t.randn(n, 8)))


@case
def branch_on_dimensions(t: Run):
    m = t.convert(net(lambda s, x: s.l(x) if x.dim() == 2 else s.l(x).sum(1)))
    for shape in ((4, 8), (2, 3, 8), (4, 8)):
        t.backward(t(m, t.randn(*shape)))


@case
def own_context_manager(t: Run):
    log = []

    @contextlib.contextmanager
    def logged(name):
        log.append(name)
        try:
            yield
        finally:
            log.append("end")

    def forward(s, x):
        with logged("l"):
            return s.l(x)

    t.changes(net(forward), again)
    t.see("log", log)


@case
def exit_stack(t: Run):
    def forward(s, x):
        with contextlib.ExitStack() as stack:
            if s.frozen:
                stack.enter_context(torch.no_grad())
            return s.l(x)

    t.changes(net(forward, frozen=False), lambda m: setattr(m, "frozen", True), lambda m: setattr(m, "frozen", False))


@case
def profiled_part(t: Run):
    def forward(s, x):
        with torch.profiler.record_function("l"):
            return s.l(x)

    t.changes(net(forward), again)


@case
def early_return(t: Run):
    def forward(s, x, stage=0):
        h = s.l(x)
        if stage == 1:
            return h
        h = s.r(h)
        if stage == 2:
            return h, None
        return {"h": h}

    m, x = t.convert(net(forward, Two)), t.randn(4, 8)
    for stage in (0, 1, 2, 0):
        t(m, x, stage)


@case
def match_statement(t: Run):
    def forward(s, x):
        match s.mode:
            case "double":
                return s.l(x) * 2
            case ("times", k):
                return s.l(x) * k
            case _:
                return s.l(x)

    t.changes(
        net(forward, mode="double"), lambda m: setattr(m, "mode", ("times", 3.0)), lambda m: setattr(m, "mode", None)
    )


@case
def data_dependent_shapes(t: Run):
    m = t.convert(net(lambda s, x: (s.l(x[x[:, 0] > 0]), x.nonzero().shape, x[x > 0].sum())))
    for _ in range(3):
        t.backward(t(m, t.randn(4, 8)))


@case
def experts(t: Run):
    def forward(s, x):
        which = x[:, 0] > 0
        out = torch.zeros_like(x)
        for flag, expert in zip((True, False), (s.l, s.r), strict=True):
            rows = (which == flag).nonzero().squeeze(-1)
            if rows.numel():
                out = out.index_add(0, rows, expert(x[rows]).to(out.dtype))
        return out

    m = t.convert(net(forward, Two))
    for _ in range(2):
        t.backward(t(m, t.randn(4, 8)))


@case
def shapes_of_all_kinds(t: Run):
    def forward(s, x):
        b, n = x.shape[0], x.size(-1)
        return s.l(x).view(b, 2, n // 2).transpose(1, 2).reshape(b * n // 2, -1) * (b / n) + len(x)

    m = t.convert(net(forward))
    for n in (4, 2, 6):
        t.backward(t(m, t.randn(n, 8)))


@case
def lambda_and_map(t: Run):
    t.changes(net(lambda s, x: sum(map(lambda k: s.l(x) * k, filter(None, [0, 1, 2])))), again)


@case
def sorted_by_a_key(t: Run):
    def forward(s, x):
        for _, layer in sorted({"b": s.l, "a": s.r}.items(), key=lambda item: item[0]):
            x = layer(x)
        return x

    t.changes(net(forward, Two), again)


@case
def operators_of_python(t: Run):
    def forward(s, x):
        h = s.l(x)
        h += 1
        h = -h + abs(h) - h**2 / (1 + abs(h)) + 1 % (2 + h.detach() // 64)
        a, *rest = h.unbind(0)
        return a + sum(rest), h @ h.t(), (h[..., ::2], h[None, 1:-1], h[h[:, 0].argsort().clamp(max=3)].shape)

    t.changes(net(forward), again)
