"""Layers with ways of their own: norms, recurrent, lazy, scripted, shared, attention, embeddings."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tests.hostile.harness import Cases, Run
from tests.hostile.models import Net, Two, again, net

CASES = case = Cases("layers")


def with_norm(norm, *changes):
    """Between two layers; no bias before it, whose gradient would be rounding alone."""

    def run(t: Run):
        t.changes(nn.Sequential(nn.Linear(8, 8, bias=False), norm(), nn.Linear(8, 8)), again, *changes, again)

    return run


@case
def batch_norm_without_momentum(t: Run):
    with_norm(lambda: nn.BatchNorm1d(8, momentum=None), lambda m: m.eval())(t)


@case
def batch_norm_without_statistics(t: Run):
    with_norm(lambda: nn.BatchNorm1d(8, track_running_stats=False), lambda m: m.eval())(t)


@case
def batch_norm_without_weights(t: Run):
    with_norm(lambda: nn.BatchNorm1d(8, affine=False), lambda m: m.eval(), lambda m: m.train())(t)


@case
def batch_norm_of_all_ranks(t: Run):
    with_norm(lambda: nn.SyncBatchNorm(8), lambda m: m.eval())(t)


@case
def batch_norm_converted_to_sync(t: Run):
    t.changes(
        nn.Sequential(nn.Linear(8, 8, bias=False), nn.BatchNorm1d(8), nn.Linear(8, 8)),
        lambda m: m.__setitem__(1, nn.SyncBatchNorm.convert_sync_batchnorm(m[1])),
        lambda m: m.eval(),
    )


@case
def statistics_reset(t: Run):
    with_norm(lambda: nn.BatchNorm1d(8), lambda m: m[1].reset_running_stats())(t)


@case
def batch_renormalization_by_hand(t: Run):
    def forward(s, x):
        h = s.l(x)
        if s.training:
            mean, var = h.float().mean(0), h.float().var(0, unbiased=False)
            with torch.no_grad():
                s.mean += 0.1 * (mean - s.mean)
                s.count += 1
        else:
            mean, var = s.mean, s.var
        return s.r((h - mean) / (var + 1).sqrt())

    m = net(forward, Two)
    m.register_buffer("mean", torch.zeros(8))
    m.register_buffer("var", torch.ones(8))
    m.register_buffer("count", torch.tensor(0))
    if t.variant == "fp64":
        m.float = lambda: m
    t.changes(m, again, lambda m: m.eval(), again)


@case
def group_and_instance_norm(t: Run):
    m = nn.Sequential(nn.Conv2d(2, 4, 3, bias=False), nn.GroupNorm(2, 4), nn.ReLU(), nn.InstanceNorm2d(4, affine=True))
    m, x = t.convert(m), t.randn(2, 2, 6, 6)
    t(m, x)
    t(m.eval(), x)


@case(no_twin="float64 draws other weights")
def lazy_linear(t: Run):
    m = t.convert(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.LazyLinear(3)))
    t(m, t.randn(4, 8))
    t.backward(t(m, t.randn(4, 8)))


@case(no_twin="float64 draws other weights")
def lazy_norm(t: Run):
    m = t.convert(nn.Sequential(nn.LazyConv2d(4, 3), nn.LazyBatchNorm2d(), nn.ReLU(), nn.Conv2d(4, 2, 1)))
    x = t.randn(2, 2, 5, 5)
    t(m, x)
    t(m.eval(), x)


@case
def scripted_child(t: Run):
    m = net(lambda s, x: s.child(s.l(x)))
    m.child = torch.jit.script(nn.Sequential(nn.Linear(8, 8), nn.ReLU()))
    t.changes(m, again)


@case
def traced_child(t: Run):
    m = net(lambda s, x: s.child(s.l(x)))
    m.child = torch.jit.trace(nn.Sequential(nn.Linear(8, 8), nn.ReLU()), torch.randn(4, 8))
    t.changes(m, again)


@case
def scripted_function(t: Run):
    @torch.jit.script
    def activation(x: torch.Tensor, k: float):
        return x * torch.sigmoid(k * x)

    t.changes(net(lambda s, x: s.r(activation(s.l(x), 1.7)), Two), again)


@case
def compiled_child(t: Run):
    m = Two()
    m.l = torch.compile(m.l, backend="eager")
    t.changes(m, again)


@case
def disabled_function(t: Run):
    @torch.compiler.disable
    def hidden(x):
        return x * 2

    t.changes(net(lambda s, x: s.r(hidden(s.l(x))), Two), again)


@case
def graph_module_child(t: Run):
    m = net(lambda s, x: s.child(s.l(x)))
    m.child = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(8, 8), nn.ReLU()))
    t.changes(m, again)


@case
def graph_module_as_the_model(t: Run):
    m, x = t.convert(torch.fx.symbolic_trace(nn.Sequential(nn.Linear(8, 8), nn.ReLU()))), t.randn(4, 8)
    t.backward(t(m, x))
    t.backward(t(m.eval(), x))


@case
def one_layer_many_times(t: Run):
    t.changes(net(lambda s, x: s.l(torch.tanh(s.l(torch.tanh(s.l(x)))))), again)


@case
def one_layer_under_two_names(t: Run):
    m = Two()
    m.r = m.l
    t.changes(m, lambda m: setattr(m, "r", t.wide(nn.Linear(8, 8))))


@case
def quantizing_codebook(t: Run):
    def forward(s, x):
        h = s.l(x)
        d = torch.cdist(h, s.book.to(h.dtype))
        q = s.book[d.argmin(-1)]
        return h + (q - h).detach(), d.argmin(-1).shape

    m = net(forward)
    m.register_buffer("book", torch.tensor([[9.0] * 8, [-9.0] * 8]))
    t.changes(m, again)


@case
def hypernetwork(t: Run):
    def forward(s, x):
        w = s.l(x.mean(0, keepdim=True)).view(8, 1) * s.r.weight
        return F.linear(x, w, s.r.bias)

    t.changes(net(forward, Two), again)


@case(no_autocast="tensordot takes no mixed dtypes")
def einsum_and_tensordot(t: Run):
    def forward(s, x):
        h = torch.einsum("bi,oi->bo", x, s.l.weight)
        return torch.tensordot(h, s.l.weight, dims=([1], [0])) + torch.einsum("bi,bi->b", h, h)[:, None]

    t.changes(net(forward), again)


@case
def empty_module(t: Run):
    m = net(lambda s, x: s.l(s.pass_(s.none(x))))
    m.pass_, m.none = nn.Identity(), nn.Sequential()
    t.changes(m, again)


@case(wide="bilinear promotes, as under autocast on CUDA")
def bilinear(t: Run):
    m, x, w = t.convert(nn.Bilinear(8, 8, 2)), t.randn(4, 8), t.randn(4, 8)
    t.backward(t(m, x, w))


@case
def convolutions_of_all_kinds(t: Run):
    m = nn.Sequential(
        nn.Conv2d(2, 4, 3, padding="same", padding_mode="circular"),
        nn.Conv2d(4, 4, 3, groups=4),
        nn.ConvTranspose2d(4, 2, 2, stride=2),
        nn.PixelShuffle(1),
        nn.Upsample(scale_factor=2, mode="bilinear"),
        nn.Flatten(),
        nn.Linear(2 * 12 * 12, 3),
    )
    t.backward(t(t.convert(m), t.randn(1, 2, 5, 5)))


@case
def deep_recursion_of_modules(t: Run):
    m: nn.Module = Net()
    for _ in range(12):
        m = nn.Sequential(m)
    t.changes(m, again)
