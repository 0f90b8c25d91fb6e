"""Randomness in a forward: dropout, noise, seeds, generators, forks. In float64 other numbers would be drawn."""

from __future__ import annotations

import functools
import random

import numpy
import torch
import torch.nn.functional as F
from torch import nn

from tests.hostile.harness import Cases, Run, no_lstm_under_autocast
from tests.hostile.models import Two, again, net

CASES = Cases("random")


#: No float64 twin, for it draws other numbers.
def case(run, no_autocast=""):
    return CASES(run, no_twin="float64 draws other numbers", no_autocast=no_autocast)


@case
def dropout(t: Run):
    t.changes(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8)), again, lambda m: m.eval())


@case
def dropout_seeded(t: Run):
    m, x = t.convert(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8))), t.randn(4, 8)
    for _ in range(2):
        torch.manual_seed(3)
        t.backward(t(m, x))


@case
def dropout_always(t: Run):
    t.changes(net(lambda s, x: s.r(F.dropout(s.l(x), 0.5)), Two), lambda m: m.eval())


@case
def dropout_of_other_kinds(t: Run):
    def forward(s, x):
        h = F.alpha_dropout(s.l(x), 0.3, training=s.training)
        h = F.feature_alpha_dropout(h[:, :, None], 0.3, training=s.training)[..., 0]
        return F.dropout1d(s.r(h), 0.3, training=s.training), F.rrelu(h, training=s.training)

    t.changes(net(forward, Two), again, lambda m: m.eval())


@case
def noise_like_the_input(t: Run):
    t.changes(net(lambda s, x: s.l(x + torch.randn_like(x)) * torch.rand_like(x)), again)


@case
def noise_of_the_shape(t: Run):
    t.changes(net(lambda s, x: s.l(x) + torch.randn(x.shape) * torch.empty(8).uniform_(1, 2)), again)


@case
def bernoulli(t: Run):
    t.changes(net(lambda s, x: s.l(x) * torch.bernoulli(torch.full_like(x, 0.5))), again)


@case
def stochastic_depth(t: Run):
    def forward(s, x):
        keep = torch.rand(x.shape[0], 1) < 0.5
        return x + s.l(x) * keep / 0.5

    t.changes(net(forward), again, again)


@case
def layer_drop(t: Run):
    def forward(s, x):
        return s.r(s.l(x)) if torch.rand(()) < 0.5 else s.r(x)

    t.changes(net(forward, Two), *[again] * 4)


@case
def layer_drop_by_python(t: Run):
    t.changes(net(lambda s, x: s.r(s.l(x)) if random.random() < 0.5 else s.r(x), Two), *[again] * 4)


@case
def layer_drop_by_numpy(t: Run):
    t.changes(net(lambda s, x: s.r(s.l(x)) if numpy.random.rand() < 0.5 else s.r(x), Two), *[again] * 4)


@case
def permutation(t: Run):
    t.changes(net(lambda s, x: s.l(x[torch.randperm(x.shape[0])])), again)


@case
def shuffled_by_python(t: Run):
    def forward(s, x):
        order = list(range(4))
        random.shuffle(order)
        return s.l(x[order])

    t.changes(net(forward), again, again)


@case
def seed_inside(t: Run):
    def forward(s, x):
        torch.manual_seed(7)
        return s.l(x) + torch.randn(8)

    t.changes(net(forward), again)


@case
def forked_state(t: Run):
    def forward(s, x):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(7)
            noise = torch.randn(8)
        return s.l(x) + noise + torch.randn(8)

    t.changes(net(forward), again)


@case
def forked_around(t: Run):
    m, x = t.convert(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5))), t.randn(4, 8)
    with torch.random.fork_rng(devices=[]):
        t(m, x)
    t(m, x)


@case
def own_generator(t: Run):
    m = net(lambda s, x: s.l(x) + torch.randn(8, generator=s.generator), generator=torch.Generator().manual_seed(3))
    t.changes(m, again, lambda m: m.generator.manual_seed(3))


@case
def generator_as_argument(t: Run):
    m, x = t.convert(net(lambda s, x, g: s.l(x) + torch.randn(8, generator=g))), t.randn(4, 8)
    g = torch.Generator().manual_seed(3)
    t.quiet(m, x, g)
    t(m, x, g)
    t.watch("generator", g)


@case
def multinomial(t: Run):
    def forward(s, x):
        h = s.l(x)
        return h, torch.multinomial(torch.ones(4, 8), 3), torch.randint(0, 9, (3,))

    t.changes(net(forward), again)


@case
def gumbel(t: Run):
    t.changes(net(lambda s, x: s.r(F.gumbel_softmax(s.l(x), tau=2.0)), Two), again)


@case
def distributions(t: Run):
    def forward(s, x):
        normal = torch.distributions.Normal(s.l(x), torch.nn.functional.softplus(s.r(x)))
        z = normal.rsample()
        return (
            z,
            normal.log_prob(z.detach()),
            torch.distributions.kl_divergence(normal, torch.distributions.Normal(torch.zeros(8), torch.ones(8))),
        )

    t.changes(net(forward, Two), again)


@case
def variational(t: Run):
    def forward(s, x):
        mean, log = s.l(x).chunk(2, -1)
        z = mean + torch.exp(0.5 * log) * torch.randn_like(mean)
        return s.r(torch.cat([z, z], -1)), -0.5 * (1 + log - mean.square() - log.exp()).sum(-1)

    t.changes(net(forward, Two), again)


@case
def initialized_again(t: Run):
    t.changes(Two(), lambda m: m.l.reset_parameters(), lambda m: nn.init.orthogonal_(m.r.weight))


@case
def attention_with_dropout(t: Run):
    def forward(s, x):
        return s.r(F.scaled_dot_product_attention(s.l(x)[None], x[None], x[None], dropout_p=0.5 * s.training)[0])

    t.changes(net(forward, Two), again, lambda m: m.eval())


@functools.partial(case, no_autocast=no_lstm_under_autocast())
def recurrent_with_dropout(t: Run):
    m = nn.LSTM(8, 8, num_layers=2, dropout=0.5)
    m, x = t.convert(m), t.randn(3, 2, 8)
    t.backward(t(m, x)[0])
    t.backward(t(m.eval(), x)[0])


@case
def quasi_random(t: Run):
    m = net(lambda s, x: s.l(x) + s.sobol.draw(4), sobol=torch.quasirandom.SobolEngine(8))
    t.changes(m, again)


@case
def state_is_read(t: Run):
    m, x = t.convert(net(lambda s, x: s.l(x) * (1 + torch.initial_seed() % 5))), t.randn(4, 8)
    t(m, x)
    torch.manual_seed(3)
    t(m, x)
