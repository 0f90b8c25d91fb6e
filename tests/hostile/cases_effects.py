"""Side effects of a forward: prints, logs, warnings, calls back, files, things made in it."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings

import torch
from torch import nn

from tests.hostile.harness import Cases, Run
from tests.hostile.models import again, net

CASES = case = Cases("effects")


@case
def buffer_registered_in_the_forward(t: Run):
    def forward(s, x):
        if "seen" not in s._buffers:
            s.register_buffer("seen", torch.zeros(8, dtype=x.dtype), persistent=False)
        s.seen.add_(1)
        return s.l(x) + s.seen

    t.changes(net(forward), again)


@case
def parameter_made_in_the_forward(t: Run):
    def forward(s, x):
        if s.scale is None:
            s.scale = nn.Parameter(torch.full((8,), 2.0, dtype=x.dtype))
        return s.l(x) * s.scale

    m = net(forward)
    m.register_parameter("scale", None)
    t.changes(m, again)


@case
def child_made_in_the_forward(t: Run):
    def forward(s, x):
        if not hasattr(s, "head"):
            s.head = t.wide(nn.Linear(8, 3))
        return s.head(s.l(x))

    t.changes(net(forward), again)


@case
def parameter_normalized(t: Run):
    def forward(s, x):
        with torch.no_grad():
            s.l.weight.div_(s.l.weight.norm(dim=1, keepdim=True))
        return s.l(x)

    t.changes(net(forward), again)


@case
def flag_of_a_child(t: Run):
    def forward(s, x):
        s.d.eval()
        return s.d(s.l(x))

    m = net(forward)
    m.d = nn.Dropout(0.5)
    t.changes(m, lambda m: m.train())


@case
def prints(t: Run):
    def forward(s, x):
        print("rows", x.shape[0])
        return s.l(x)

    m, out = t.convert(net(forward)), io.StringIO()
    with contextlib.redirect_stdout(out):
        t(m, t.randn(4, 8))
        t(m, t.randn(4, 8))
        t(m, t.randn(3, 8))
    t.see("printed", out.getvalue())


@case
def logs(t: Run):
    records: list[str] = []
    log = logging.getLogger("hostile")
    t.patch(log, "handlers", [])
    t.patch(log, "propagate", False)
    t.patch(log, "level", logging.INFO)
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    log.addHandler(handler)

    def forward(s, x):
        log.info("rows %d", x.shape[0])
        return s.l(x)

    t.changes(net(forward), again)
    t.see("records", records)


@case
def warns(t: Run):
    def forward(s, x):
        warnings.warn("from the forward", RuntimeWarning, stacklevel=1)
        return s.l(x)

    m, x = t.convert(net(forward)), t.randn(4, 8)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        t(m, x)
        t(m, x)
    t.see("warnings", [str(w.message) for w in caught if w.category is RuntimeWarning])


@case
def calls_back(t: Run):
    seen = []
    m = t.convert(net(lambda s, x, f: (f(x.shape[0]), s.l(x))[1]))
    t.quiet(m, t.randn(4, 8), seen.append)
    t.quiet(m, t.randn(3, 8), seen.append)
    t.see("seen", seen)


@case
def calls_back_with_a_value(t: Run):
    seen = []

    def forward(s, x):
        h = s.l(x)
        seen.append(float(h.detach().sum()) > -1e9)
        return h

    t.changes(net(forward), again)
    t.see("seen", seen)


@case
def written_file(t: Run):
    file = io.StringIO()

    def forward(s, x):
        file.write("x")
        return s.l(x)

    t.changes(net(forward), again, again)
    t.see("file", file.getvalue())


@case
def append_to_a_default(t: Run):
    def forward(s, x, seen=[]):  # noqa: B006
        seen.append(1)
        return s.l(x) * len(seen)

    t.changes(net(forward), again)
    t.see("default", forward.__defaults__)


@case
def closure_over_a_list(t: Run):
    seen = []

    def forward(s, x):
        seen.append({"rows": x.shape[0]})
        return s.l(x)

    t.changes(net(forward), again)
    t.see("seen", seen)
