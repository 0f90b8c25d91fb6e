"""Recurrent layers, attention, embeddings, losses."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tests.hostile.harness import Cases, Run, no_lstm_under_autocast
from tests.hostile.models import Two, net

CASES = case = Cases("sequences")


@case(no_autocast=no_lstm_under_autocast())
def recurrent(t: Run):
    m, x = t.convert(nn.LSTM(8, 8, num_layers=2, batch_first=True)), t.randn(2, 3, 8)
    _, (h, c) = t(m, x)
    t.backward(t(m, x, (h.detach(), c.detach()))[0])


@case
def recurrent_both_ways(t: Run):
    m = net(lambda s, x: s.l(s.rnn(x)[0][..., :8]))
    m.rnn = nn.GRU(8, 4, bidirectional=True)
    m, x = t.convert(m), t.randn(3, 2, 8)
    t.backward(t(m, x))
    t.backward(t(m.eval(), x))


@case
def packed_sequence(t: Run):
    m = t.convert(nn.RNN(8, 8, batch_first=True))
    packed = nn.utils.rnn.pack_padded_sequence(t.randn(2, 3, 8), torch.tensor([3, 2]), batch_first=True)
    out, h = t.quiet(m, packed)
    t.see("out", (out.data, out.batch_sizes, h))
    t.backward(h)


@case
def packed_inside(t: Run):
    def forward(s, x, lengths):
        packed = nn.utils.rnn.pack_padded_sequence(s.l(x), lengths, batch_first=True, enforce_sorted=False)
        return nn.utils.rnn.pad_packed_sequence(s.rnn(packed)[0], batch_first=True)[0]

    m = net(forward)
    m.rnn = nn.LSTM(8, 4, batch_first=True)
    m, x = t.convert(m), t.randn(3, 4, 8)
    for lengths in ([4, 2, 3], [1, 4, 4]):
        t.backward(t(m, x, torch.tensor(lengths)))


@case
def cells_in_a_loop(t: Run):
    def forward(s, x):
        h = c = x.new_zeros(x.shape[1], 8)
        for row in x:
            h, c = s.cell(row, (h, c))
        return s.l(h)

    m = net(forward)
    m.cell = nn.LSTMCell(8, 8)
    m = t.convert(m)
    for n in (3, 2):
        t.backward(t(m, t.randn(n, 4, 8)))


@case
def tied_embedding(t: Run):
    m = nn.Sequential(nn.Embedding(6, 8), nn.Linear(8, 8), nn.Linear(8, 6, bias=False))
    m[2].weight = m[0].weight
    m, ids = t.convert(m), torch.tensor([[0, 5], [3, 3]])
    for _ in range(2):
        t.backward(t(m, ids))


@case
def embedding_with_padding_and_norm(t: Run):
    """max_norm writes its weights in the forward."""
    m = nn.Sequential(nn.Embedding(6, 8, padding_idx=0, max_norm=1.0), nn.Linear(8, 3))
    m, ids = t.convert(m), torch.tensor([0, 5, 3])
    t.backward(t(m, ids))
    t(m, ids)


@case
def embedding_bag(t: Run):
    m = nn.Sequential(nn.EmbeddingBag(6, 8, mode="sum"), nn.Linear(8, 3))
    t.backward(t(t.convert(m), torch.tensor([[0, 5], [3, 3]])))


@case
def attention(t: Run):
    m = net(lambda s, x, mask=None: s.mha(s.l(x), x, x, attn_mask=mask))
    m.mha = nn.MultiheadAttention(8, 2, batch_first=True)
    m, x = t.convert(m), t.randn(2, 3, 8)
    t.backward(t(m, x)[0])
    t(m, x, torch.ones(3, 3).triu(1).bool())
    t(m.eval(), x)


@case
def attention_by_hand(t: Run):
    def forward(s, x):
        q, k = s.l(x).view(2, 3, 2, 4).transpose(1, 2), s.r(x).view(2, 3, 2, 4).transpose(1, 2)
        return F.scaled_dot_product_attention(q, k, k, is_causal=x.shape[1] > 1)

    m = t.convert(net(forward, Two))
    for _ in range(2):
        t.backward(t(m, t.randn(2, 3, 8)))


# To trace its fast path, which has no meta kernel before torch 2.13, dynamo runs that once on FP32 zeros.
@case(wide=torch.__version__ < "2.13")
def transformer_layer(t: Run):
    m = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, norm_first=True)
    m, x = t.convert(m), t.randn(2, 3, 8)
    t.backward(t(m, x))
    with torch.no_grad():
        t(m.eval(), x)
    t(m.train(), x, src_key_padding_mask=torch.tensor([[False, False, True], [False, False, False]]))


@case
def losses(t: Run):
    def forward(s, x, y):
        h = s.l(x)
        return (
            F.cross_entropy(h, y),
            F.mse_loss(h, x),
            F.kl_div(h.log_softmax(-1), x.softmax(-1)),
            F.gaussian_nll_loss(h, x, torch.ones_like(x)),
        )

    m = t.convert(net(forward))
    t.backward(t(m, t.randn(4, 8), torch.tensor([0, 1, -100, 7])))


@case
def connectionist_loss(t: Run):
    def forward(s, x, targets):
        logs = s.l(x).log_softmax(-1)
        lengths = torch.full((x.shape[1],), x.shape[0])
        return F.ctc_loss(logs, targets, lengths, torch.full((x.shape[1],), 2))

    t.backward(t(t.convert(net(forward)), t.randn(5, 2, 8), torch.tensor([[1, 2], [3, 4]])))


@case
def contrastive(t: Run):
    def forward(s, x, y):
        a, b = F.normalize(s.l(x), dim=-1), F.normalize(s.r(y), dim=-1)
        return a @ b.t() * s.scale.exp().clamp(max=100)

    m = net(forward, Two)
    m.scale = nn.Parameter(torch.tensor(2.0))
    t.backward(t(t.convert(m), t.randn(4, 8), t.randn(4, 8)))


@case
def state_space_scan(t: Run):
    def forward(s, x):
        a, h, out = torch.sigmoid(s.r(x)), torch.zeros_like(x[0]), []
        for k in range(x.shape[0]):
            h = a[k] * h + s.l(x[k])
            out.append(h)
        return torch.stack(out)

    t.backward(t(t.convert(net(forward, Two)), t.randn(4, 8)))
