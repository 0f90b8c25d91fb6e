"""Inputs of other dtypes and shapes: float64, integers, bool, complex, low, mixed, 0-dim, empty, sparse."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tests.hostile.harness import Cases, Run
from tests.hostile.models import Two, net

CASES = case = Cases("dtypes")

WIDE = "float64 on the way: there is nothing wider"
SPARSE = "dynamo takes no sparse inputs: code with them runs in FP32, since autocast has few kernels for them"


@case(no_twin=WIDE)
def wide_input_is_made_narrow(t: Run):
    m = t.convert(net(lambda s, x: s.l(x.float())))
    t(m, t.randn(4, 8).double())
    t(m, t.randn(4, 8))


@case(no_twin=WIDE)
def wide_branch(t: Run):
    m = t.convert(net(lambda s, x, w: s.l(x) + (w @ w.t()).sum()))
    t.backward(t(m, t.randn(4, 8), t.randn(4, 8).double()))


@case(no_twin=WIDE)
def wide_sum_inside(t: Run):
    t.changes(net(lambda s, x: s.l(x) / s.l(x).double().square().sum(-1, keepdim=True).sqrt().float()))


@case(no_twin=WIDE)
def wide_cumulative(t: Run):
    t.changes(net(lambda s, x: s.l(x).cumsum(0, dtype=torch.float64)))


@case(no_twin="bfloat16 on the way")
def low_input(t: Run):
    m, x = t.convert(net(lambda s, x: s.l(x.float()))), t.randn(4, 8).bfloat16()
    t.backward(t(m, x))


@case(no_twin="bfloat16 on the way")
def low_and_wide_inputs_in_turn(t: Run):
    m, x = t.convert(net(lambda s, x: (s.l(x.to(s.l.weight.dtype)), x + 1))), t.randn(4, 8)
    t(m, x)
    t(m, x.bfloat16())
    t(m, x.half())
    t(m, x.double())
    t(m, x)


@case
def integers(t: Run):
    m = t.convert(net(lambda s, x: (s.l(F.one_hot(x, 8).to(s.l.weight.dtype)), x + 1, x // 2, x / 2)))
    for dtype in (torch.int64, torch.int64):
        t(m, torch.tensor([0, 3, 7], dtype=dtype))


@case(no_twin="x / 2 of integers is FP32")
def integer_dtypes_in_turn(t: Run):
    m = t.convert(net(lambda s, x: (s.l(x[:, None].to(s.l.weight.dtype).expand(-1, 8)), x * 2, x + 200)))
    for dtype in (torch.int64, torch.uint8, torch.int8, torch.int32, torch.bool):
        t(m, torch.tensor([0, 1, 1]).to(dtype))


@case
def large_integers(t: Run):
    """Indices beyond what a low float holds."""
    m = t.convert(net(lambda s, x, i: (s.l(x), i * 3 + 1, (i.to(x.dtype) + 0.5).floor().long())))
    t(m, t.randn(4, 8), torch.tensor([1001, 65537, 300001]))


@case
def mask_of_bool(t: Run):
    m = t.convert(net(lambda s, x, on: s.l(x).masked_fill(~on, float("-inf")).softmax(-1) * on))
    t(m, t.randn(4, 8), torch.arange(8) % 3 != 0)


@case
def mask_of_the_least_number(t: Run):
    def forward(s, x, on):
        h = s.l(x)
        return torch.where(on, h, torch.finfo(h.dtype).min).softmax(-1)

    m = t.convert(net(forward))
    t.backward(t(m, t.randn(4, 8), torch.arange(8) % 3 != 0))


@case(no_autocast="torch.complex takes no bfloat16")
def complex_inside(t: Run):
    def forward(s, x):
        z = torch.complex(s.l(x), s.l(x + 1))
        return z.abs(), (z * z.conj()).real, torch.view_as_real(z)

    t.changes(net(forward))


@case
def complex_input(t: Run):
    m = t.convert(net(lambda s, z: s.l(z.real) + s.l(z.imag)))
    t.backward(t(m, torch.complex(t.randn(4, 8), t.randn(4, 8))))


@case
def complex_rotary(t: Run):
    def forward(s, x):
        freqs = torch.polar(torch.ones(4, 4, dtype=x.dtype), torch.arange(16, dtype=x.dtype).view(4, 4) / 7)
        z = torch.view_as_complex(s.l(x).view(4, 4, 2).to(x.dtype).contiguous())
        return s.r(torch.view_as_real(z * freqs).flatten(1))

    t.changes(net(forward, Two))


@case
def fourier(t: Run):
    t.changes(net(lambda s, x: torch.fft.irfft(torch.fft.rfft(s.l(x).to(x.dtype)) * 2, n=8)))


@case
def zero_dimensions(t: Run):
    m = t.convert(net(lambda s, x, k: s.l(x) * k + k))
    t.backward(t(m, t.randn(4, 8), t.wide(torch.tensor(2.0))))
    t(m, t.randn(4, 8), torch.tensor(2))
    t(m, t.randn(4, 8), 2)


@case
def vector_input(t: Run):
    m = t.convert(Two())
    t.backward(t(m, t.randn(8)))
    t.backward(t(m, t.randn(2, 3, 8)))


@case
def empty_batch(t: Run):
    m = t.convert(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 3)))
    t.backward(t(m, t.randn(0, 8)))
    t.backward(t(m, t.randn(4, 8)))
    t(m, t.randn(2, 0, 8))


@case
def empty_batch_of_images(t: Run):
    m = t.convert(nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1)))
    t.backward(t(m, t.randn(0, 1, 5, 5)))
    t(m, t.randn(2, 1, 5, 5))


@case(wide=SPARSE)
def sparse_input(t: Run):
    m = t.convert(net(lambda s, x: s.l(torch.sparse.mm(x, s.w)), w=t.randn(6, 8)))
    x = (t.randn(4, 6) > 0.5).to(m.w.dtype).to_sparse()
    t(m, x)
    t.backward(t(m, x))


@case(wide=SPARSE)
def sparse_input_made_dense(t: Run):
    m = t.convert(net(lambda s, x: s.l(x.to_dense())))
    t.backward(t(m, t.randn(4, 8).to_sparse()))


@case
def sparse_gradients(t: Run):
    m = nn.Sequential(nn.Embedding(6, 8, sparse=True), nn.Linear(8, 3))
    m, ids = t.convert(m), torch.tensor([1, 3, 1])
    t.backward(t(m, ids))


@case
def nested_tensor(t: Run):
    m = t.convert(net(lambda s, x: s.l(x)))
    x = torch.nested.nested_tensor([t.randn(2, 8), t.randn(3, 8)], layout=torch.jagged)
    out = t.quiet(m, x)
    t.see("parts", [part.detach() for part in out.unbind()])


@case
def dtype_of_the_parameters_is_asked(t: Run):
    def forward(s, x):
        return s.l(x.to(next(s.parameters()).dtype)) * (3 if next(s.parameters()).dtype.itemsize >= 4 else 1)

    t.changes(net(forward))


@case
def dtype_of_the_hidden_state_is_asked(t: Run):
    """What autocast answers may differ from what the original answers: the values may not."""

    def forward(s, x):
        h = s.l(x)
        scale = torch.arange(8, dtype=h.dtype, device=h.device) / 8
        return s.r(h * scale.to(h.dtype)).to(x.dtype)

    t.changes(net(forward, Two))


@case
def eps_by_dtype(t: Run):
    t.changes(net(lambda s, x: s.l(x) / (s.l(x).abs().sum(-1, keepdim=True) + torch.finfo(x.dtype).eps)))


@case
def type_as_and_new(t: Run):
    def forward(s, x):
        h = s.l(x)
        return h + h.new_ones(8) + torch.ones(8, dtype=torch.int64).type_as(h), h.new_tensor([1, 2])

    m = t.convert(net(lambda s, x: forward(s, x)[0].to(x.dtype)))
    t.backward(t(m, t.randn(4, 8)))


@case
def is_floating_point_and_size(t: Run):
    t.changes(net(lambda s, x: s.l(x) * (2 if s.l(x).is_floating_point() else 1) * s.l(x).dim()))


@case
def comparison_and_ranks(t: Run):
    m = t.convert(net(lambda s, x: (s.l(x) > 100, s.l(x).isnan().any(), s.l(x).shape)))
    t(m, t.randn(4, 8))


@case
def numpy_leaves_and_returns(t: Run):
    def forward(s, x):
        h = s.l(x).detach().float().numpy()
        return s.r(x) + torch.from_numpy(h * 2).to(x.dtype)

    t.changes(net(forward, Two))


@case
def items_and_lists(t: Run):
    def forward(s, x):
        scale = x.abs().sum().item()
        rows = [len(row) for row in x.tolist()]
        return s.l(x) / scale + sum(rows)

    t.changes(net(forward))


@case
def quantized_by_hand(t: Run):
    def forward(s, x):
        q = torch.clamp((x * 16).round(), -128, 127).to(torch.int8)
        return s.l(q.to(x.dtype) / 16), q

    t(t.convert(net(forward)), t.randn(4, 8))


@case
def autocast_inside(t: Run):
    def forward(s, x):
        h = s.l(x)
        with torch.autocast("cpu", enabled=False):
            return s.r(h.to(s.r.weight.dtype))

    t.changes(net(forward, Two))


@case
def autocast_asked(t: Run):
    """A model that looks whether autocast is on sees what it would see under autocast, or what the original sees."""
    m = t.convert(net(lambda s, x: s.l(x) * 2))
    t(m, t.randn(4, 8))
    t.see("off", torch.is_autocast_enabled("cpu"))


@case(no_autocast="torch.autocast fails on mixed dtypes here", no_twin="FP32 on the way")
def scatter_of_mixed_dtypes(t: Run):
    def forward(s, x, i):
        return torch.zeros(4, 8).scatter_add(0, i, s.l(x)).index_add(0, i[:, 0], s.l(x))

    m = t.convert(net(forward))
    t.backward(t(m, t.randn(4, 8), torch.tensor([[0], [2], [1], [3]]).expand(4, 8)))


@case
def weights_of_two_dtypes(t: Run):
    m = t.wide(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))
    m.register_buffer("ids", torch.arange(3))
    m.register_buffer("on", torch.ones(3).bool())
    t.changes(m)


def _through_float8(dtype: torch.dtype):
    def run(t: Run):
        def forward(s, x):
            q = s.l(x).clamp(0.25, 4).to(dtype)
            return s.r(q.to(torch.float32)).sum() + q.float().sum(), q.dtype

        m, x = t.convert(net(forward, Two)), t.randn(4, 8)
        with torch.no_grad():
            t(m, x)

    run.__name__ = f"through_{str(dtype).removeprefix('torch.')}"
    case(run, no_twin="rounds to steps of which a float64 run takes others", no_autocast="likewise")


for name in ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"):
    if hasattr(torch, name):
        _through_float8(getattr(torch, name))
