"""What a forward writes: counters, caches, nested containers, buffers, prints, other objects."""

from __future__ import annotations

import torch

from tests.hostile.harness import Cases, Run
from tests.hostile.models import Net, Two, again, net

CASES = case = Cases("writes")


@case
def counter(t: Run):
    def forward(s, x):
        s.calls += 1
        return s.l(x) * s.calls

    t.changes(net(forward, calls=0), again, again)


@case
def counter_in_a_dict(t: Run):
    def forward(s, x):
        s.stats["calls"] += 1
        return s.l(x)

    t.changes(net(forward, stats={"calls": 0}), again, again)


@case
def list_in_a_dict(t: Run):
    def forward(s, x):
        s.st["n"].append(x.shape[0])
        return s.l(x)

    t.changes(net(forward, st={"n": []}), again, again)


@case
def tensors_in_nested_containers(t: Run):
    def forward(s, x):
        h = s.l(x)
        s.st["n"]["h"].append(h.detach())
        return h

    t.changes(net(forward, st={"n": {"h": []}}), again)


@case
def object_of_the_module(t: Run):
    class Stats:
        calls = 0

        def __init__(self):
            self.seen = []

    def forward(s, x):
        s.stats.calls += 1
        s.stats.seen.append(tuple(x.shape))
        return s.l(x)

    t.changes(net(forward, stats=Stats()), again)


@case
def class_attribute(t: Run):
    class M(Net):
        calls = 0

        def forward(self, x):
            type(self).calls += 1
            return self.l(x)

    t.changes(M(), again)
    t.see("calls", (M.calls, type(M.calls)))


@case
def class_attribute_by_name(t: Run):
    class M(Net):
        calls = 0

        def forward(self, x):
            M.calls += 1
            return self.l(x) * M.calls

    t.changes(M(), again)
    t.see("calls", M.calls)


@case
def attribute_of_a_child(t: Run):
    def forward(s, x):
        s.l.seen = getattr(s.l, "seen", 0) + 1
        return s.l(x)

    t.changes(net(forward), again)


@case
def hidden_state_kept(t: Run):
    def forward(s, x):
        s.hidden = torch.tanh(s.l(x))
        return s.r(s.hidden)

    t.changes(net(forward, Two), again)


@case
def hidden_state_read(t: Run):
    def forward(s, x):
        h = s.l(x) if s.state is None else s.l(x) + s.state
        s.state = h.detach()
        return h

    t.changes(net(forward, state=None), again, lambda m: setattr(m, "state", None))


@case
def list_of_hidden_states(t: Run):
    def forward(s, x):
        s.hidden.append(s.l(x))
        return torch.stack(s.hidden).sum(0)

    m, x = t.convert(net(forward, hidden=[])), t.randn(4, 8)
    for _ in range(3):
        t(m, x)
    t.backward(t(m, x))


@case
def cache_by_shape(t: Run):
    def forward(s, x):
        if x.shape[0] not in s.cache:
            s.cache[x.shape[0]] = torch.ones(x.shape[0], 1, dtype=x.dtype) * len(s.cache)
        return s.l(x) + s.cache[x.shape[0]]

    m = t.convert(net(forward, cache={}))
    for n in (4, 3, 4):
        t(m, t.randn(n, 8))


CACHE: dict[object, torch.Tensor] = {}


@case
def outside_cache_of_another_model(t: Run):
    """What tracing one model leaves in a shared cache must not break another that was never converted."""
    t.defer(CACHE.clear)

    def forward(s, x):
        if "mask" not in CACHE:
            CACHE["mask"] = torch.ones(8, dtype=x.dtype) * 2
        return s.l(x) * CACHE["mask"]

    m, other, x = t.convert(net(forward)), t.wide(net(forward)), t.randn(4, 8)
    t.see("other", other(x))
    t(m, x)
    t.see("cache", CACHE)


@case
def outside_cache_of_a_product(t: Run):
    t.defer(CACHE.clear)

    def forward(s, x):
        if "h" not in CACHE:
            CACHE["h"] = s.l(x).detach()
        return s.l(x) + CACHE["h"]

    t.changes(net(forward), again)
    t.see("keys", list(CACHE))


@case
def cache_dropped_in_between(t: Run):
    def forward(s, x):
        if s.table is None or s.table.shape[0] < x.shape[0]:
            s.table = torch.arange(x.shape[0], dtype=x.dtype)[:, None] / 10
        return s.l(x) + s.table[: x.shape[0]]

    m = t.convert(net(forward, table=None))
    t(m, t.randn(4, 8))
    m.table = None
    t(m, t.randn(3, 8))
    t(m, t.randn(6, 8))


@case
def buffer_counted(t: Run):
    def forward(s, x):
        s.n += 1
        return s.l(x) * s.n

    m = net(forward)
    m.register_buffer("n", torch.zeros((), dtype=torch.int64))
    t.changes(m, again, again)


@case
def buffer_replaced(t: Run):
    def forward(s, x):
        s.mean = s.mean * 0.9 + s.l(x).detach().mean(0) * 0.1
        return s.l(x) - s.mean

    m = net(forward)
    m.register_buffer("mean", torch.zeros(8))
    t.changes(m, again, again)


@case
def buffer_written_in_training_only(t: Run):
    def forward(s, x):
        h = s.l(x)
        if s.training:
            with torch.no_grad():
                s.mean.lerp_(h.mean(0).to(s.mean.dtype), 0.1)
        return h - s.mean

    m = net(forward)
    m.register_buffer("mean", torch.zeros(8))
    t.changes(m, again, lambda m: m.eval(), lambda m: m.train())


@case
def buffer_written_by_index(t: Run):
    def forward(s, x):
        h = s.l(x)
        s.queue[s.at : s.at + 4] = h.detach()
        s.at = (s.at + 4) % 8
        return h + s.queue.mean()

    m = net(forward, at=0)
    m.register_buffer("queue", torch.zeros(8, 8))
    t.changes(m, again, again)
