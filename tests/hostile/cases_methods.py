"""Other methods than forward, children called directly, generation loops."""

from __future__ import annotations

import torch
from torch import nn

import fxprec
from tests.hostile.harness import Cases, Run
from tests.hostile.models import Net, Two, net

CASES = case = Cases("methods")

NOT_NAMED = "a method that was not named"


class Coder(nn.Module):
    """As a VAE: encode and decode, and a forward that calls both."""

    def __init__(self):
        super().__init__()
        self.down, self.up = nn.Linear(8, 4), nn.Linear(4, 8)
        self.calls = 0

    def encode(self, x, scale=1.0):
        self.calls += 1
        return self.down(x) * scale

    def decode(self, z):
        return torch.tanh(self.up(z))

    def forward(self, x):
        return self.decode(self.encode(x))


def named(t: Run, model, *methods):
    """Converted with these methods lowered too."""
    return t.convert(model, methods=methods) if t.ours else t.convert(model)


@case
def methods_that_are_named(t: Run):
    m, x = named(t, Coder(), "encode", "decode"), t.randn(4, 8)
    z = t(m.encode, x)
    t.backward(t(m.decode, z))
    t.backward(t(m, x))
    t(m.encode, x, scale=2.0)


@case
def method_of_a_child_that_is_named(t: Run):
    outer = net(lambda s, x: s.vae(s.l(x)))
    outer.vae = Coder()
    m, x = named(t, outer, "vae.encode"), t.randn(4, 8)
    t.backward(t(m.vae.encode, x))
    t.backward(t(m, x))


@case
def path_to_a_module_that_is_named(t: Run):
    m, x = named(t, Two(), "l"), t.randn(4, 8)
    t.backward(t(m.l, x))
    t.backward(t(m, x))


@case(wide=NOT_NAMED)
def methods_that_are_not_named(t: Run):
    m, x = t.convert(Coder()), t.randn(4, 8)
    t(m, x)
    t.backward(t(m.decode, t(m.encode, x)))


@case(wide=NOT_NAMED)
def child_called_directly(t: Run):
    m, x = t.convert(Two()), t.randn(4, 8)
    t(m, x)
    t.backward(t(m.l, x))


@case(wide=NOT_NAMED)
def child_called_before_any_forward(t: Run):
    m, x = t.convert(Two()), t.randn(4, 8)
    t.backward(t(m.l, x))
    t(m, x)


@case(wide=NOT_NAMED)
def training_step(t: Run):
    class M(Two):
        def training_step(self, batch):
            x, y = batch
            return (self.r(torch.relu(self.l(x))) - y).square().mean()

    m = t.convert(M())
    t(m, t.randn(4, 8))
    t.quiet(m.training_step, (t.randn(4, 8), t.randn(4, 8))).backward()


@case
def training_step_through_forward(t: Run):
    class M(Two):
        def training_step(self, batch):
            return (self(batch[0]) - batch[1]).square().mean()

    m = t.convert(M())
    t(m.training_step, (t.randn(4, 8), t.randn(4, 8))).backward()


@case(wide=NOT_NAMED)
def forward_features(t: Run):
    class M(Two):
        def forward_features(self, x):
            return self.l(x)

        def forward_head(self, x):
            return self.r(x)

        def forward(self, x):
            return self.forward_head(self.forward_features(x))

    m, x = t.convert(M()), t.randn(4, 8)
    t(m, x)
    t(m.forward_head, t(m.forward_features, x))


@case
def generation_loop(t: Run):
    class M(Two):
        @torch.no_grad()
        def generate(self, x, steps):
            for _ in range(steps):
                x = torch.cat([x, self(x[-1:])])
            return x

    m = t.convert(M())
    t(m.generate, t.randn(1, 8), 3)
    t(m.generate, t.randn(2, 8), 2)


@case
def generation_with_a_cache(t: Run):
    def forward(s, x, past=None):
        h = s.l(x) if past is None else s.l(x) + past[0].mean(0)
        return s.r(h), (h if past is None else torch.cat([past[0], h]),)

    m, x, past = t.convert(net(forward, Two)), t.randn(1, 8), None
    with torch.no_grad():
        for _ in range(4):
            x, past = t(m, x, past)


@case
def greedy_decoding(t: Run):
    m = nn.Sequential(nn.Embedding(6, 8), nn.Linear(8, 6))
    with torch.no_grad():
        m[1].weight.copy_(torch.eye(6, 8) * 8)
    m, ids = t.convert(m), torch.tensor([1])
    for _ in range(4):
        ids = torch.cat([ids, m(ids)[-1:].argmax(-1)])
    t.see("ids", ids)
    t(m, ids)


@case
def unbound_forward_of_the_class(t: Run):
    m, x = t.convert(Two()), t.randn(4, 8)
    t(type(m).forward, m, x)
    t(nn.Module.__call__, m, x)


@case
def forward_called_directly(t: Run):
    m, x = t.convert(Two()), t.randn(4, 8)
    t(m.forward, x)
    forward = m.forward
    m.eval()
    t(forward, x)


@case
def forward_kept_from_before(t: Run):
    """A bound method that was taken before the conversion: it is the original's."""
    m = Two()
    m.note = "a"
    m, x = t.convert(m), t.randn(4, 8)
    t(m.__call__, x)
    t(m.__call__, x)


@case
def super_forward(t: Run):
    class M(Two):
        def forward(self, x):
            return super().forward(x) * 2

    class N(M):
        def forward(self, x):
            return M.forward(self, x) + 1

    t.changes(N())


@case
def super_by_type(t: Run):
    """Legal where the class has no subclass."""

    class M(Two):
        def forward(self, x):
            return super(type(self), self).forward(x) * 2

    t.changes(M())


@case
def class_by_dunder(t: Run):
    class M(Two):
        scale = 3.0

        def forward(self, x):
            return super().forward(x) * self.__class__.scale * (self.__class__.__name__ == "M")

    t.changes(M())


@case
def exact_type_is_asked(t: Run):
    class M(Net):
        def forward(self, x):
            return self.l(x) * (3 if type(self) is M else 5 if isinstance(self, M) else 7)

    t.changes(M())


@case
def recursion_by_depth(t: Run):
    def forward(s, x, depth=2):
        return s.l(x) if depth == 0 else s(torch.tanh(s.l(x)), depth - 1)

    m, x = t.convert(net(forward)), t.randn(4, 8)
    t.backward(t(m, x))
    t.backward(t(m, x, 1))


@case
def recursion_over_a_tree(t: Run):
    def forward(s, tree):
        if isinstance(tree, tuple):
            return torch.tanh(s.l(s(tree[0]) + s(tree[1])))
        return s.l(tree)

    m, x = t.convert(net(forward)), t.randn(4, 8)
    t.backward(t(m, ((x, x), x)))
    t.backward(t(m, (x, (x, (x, x)))))


@case
def mutual_recursion(t: Run):
    class M(Two):
        def even(self, x, n):
            return x if n == 0 else self.odd(self.l(x), n - 1)

        def odd(self, x, n):
            return -x if n == 0 else self.even(self.r(x), n - 1)

        def forward(self, x, n):
            return self.even(x, n)

    m, x = t.convert(M()), t.randn(4, 8)
    for n in (2, 3, 0, 2):
        t.backward(t(m, x, n))


@case
def module_that_is_iterated(t: Run):
    m = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    m, x = t.convert(m), t.randn(4, 8)
    t(m, x)
    t.see("len", (len(m), [type(child).__name__ for child in m]))


@case
def function_of_tensors(t: Run):
    w = t.randn(8, 8)
    f = t.convert(lambda x, scale=1.0: torch.relu(x @ w) * scale)
    x = t.randn(4, 8).requires_grad_()
    t.backward(t(f, x))
    t.backward(t(f, x, scale=3.0))
    t.see("gradient", x.grad)


@case
def loss_inside(t: Run):
    m, x, y = Two(), t.randn(4, 8), torch.tensor([0, 1, 2, 7])
    if t.ours:
        whole = fxprec.convert(m, loss=nn.CrossEntropyLoss(), dtype=torch.bfloat16, capture=t.variant).module
    else:
        m = t.wide(m)
        whole = lambda x, y: nn.functional.cross_entropy(m(x), y)  # noqa: E731
    t(whole, x, y).backward()
    t.see("gradients", [p.grad for p in m.parameters()])
