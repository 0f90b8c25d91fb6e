"""insert_casts: one cast a tensor, dtype and mutation epoch; guards where nobody knows; outputs restored."""

from __future__ import annotations

import expecttest
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from fxprec.passes.graph.annotations import NON_TENSOR, UNKNOWN
from fxprec.passes.graph.casts import CASTS, cast, cast_if_float, cast_saturating
from fxprec.passes.graph.text import format_graph
from fxprec.passes.insert_casts import original_dtype


def casts_of(gm):
    return [node for node in gm.graph.nodes if node.target in CASTS]


class Exp(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(4, 4))

    def forward(self, x):
        return torch.exp(F.linear(x, self.w))


def test_the_graph_after(tools):
    gm = tools.rewritten(tools.traced(Exp(), torch.randn(2, 4)), tools.context(), until="insert_casts")
    expecttest.assert_expected_inline(
        format_graph(gm),
        """\
%x: float32 = placeholder
%w: float32 = get_attr[w]
%x_bf16: bfloat16 = to(%x, torch.bfloat16)
%w_bf16: bfloat16 = to(%w, torch.bfloat16)
%linear: bfloat16 = linear(%x_bf16, %w_bf16)
%linear_f32: float32 = to(%linear, torch.float32)
%exp: float32 = exp(%linear_f32)
return %exp""",
    )


def test_the_original_dtype():
    f16, f32, f64 = torch.float16, torch.float32, torch.float64
    for dtype in (f16, torch.bfloat16, f32):
        assert original_dtype(dtype) is dtype
    for info in (f64, torch.int64, torch.complex64, NON_TENSOR, None):
        assert original_dtype(info) is None
    assert original_dtype(UNKNOWN) is f32  # as far as a cast goes
    assert original_dtype((f16, torch.int64, f16)) is f16 and original_dtype((UNKNOWN, torch.int64)) is f32
    assert original_dtype((f16, f32)) is None and original_dtype((torch.int64, f64)) is None


def test_a_shared_tensor_is_cast_once(tools):
    def f(x, a, b):
        return F.linear(x, a) + F.linear(x, b)

    gm = tools.rewritten(
        tools.traced(f, torch.randn(2, 4), torch.randn(4, 4), torch.randn(4, 4)), tools.context(), "insert_casts"
    )
    assert sorted(node.args[0].name for node in casts_of(gm) if node.args[1] is torch.bfloat16) == ["a", "b", "x"]


def test_a_write_in_between_ends_the_epoch(tools):
    def f(x, a):
        y = x * 1.0
        first = F.linear(y, a)
        y.add_(1.0)
        return first + F.linear(y, a)

    inputs = (torch.randn(2, 4), torch.randn(4, 4))
    gm = tools.rewritten(tools.traced(f, *inputs), tools.context(), "insert_casts")
    low = [node for node in casts_of(gm) if node.args[1] is torch.bfloat16 and node.args[0].name != "a"]
    assert len(low) == 2
    expected = f(*inputs)
    assert torch.allclose(gm(*inputs), expected, atol=0.05, rtol=0.05)


def test_a_write_to_a_view_ends_the_epoch_of_its_base(tools):
    def f(x, a):
        y = x * 1.0
        view = y.view(-1)
        first = F.linear(y, a)
        view.mul_(3.0)
        return first + F.linear(y, a)

    inputs = (torch.randn(2, 4), torch.randn(4, 4))
    gm = tools.rewritten(tools.traced(f, *inputs), tools.context())
    assert torch.allclose(gm(*inputs), f(*inputs), atol=0.1, rtol=0.05)


def test_unknown_inputs_are_guarded_at_run_time(tools):
    def f(x, w):
        return x @ w

    gm = tools.rewritten(tools.traced(f), tools.context())
    assert {node.target for node in casts_of(gm) if node.args[1] is torch.bfloat16} == {cast_if_float}
    integers = torch.arange(4).view(2, 2)
    assert torch.equal(gm(integers, integers), integers @ integers)
    x = torch.randn(2, 2, dtype=torch.float64)
    assert gm(x, x).dtype is torch.float64


def test_integer_inputs_are_never_cast(tools):
    def f(ids, table, w):
        return F.linear(F.embedding(ids, table), w)

    gm = tools.rewritten(tools.traced(f, torch.tensor([[1, 2]]), torch.randn(4, 4), torch.randn(3, 4)), tools.context())
    assert all(node.args[0].name != "ids" for node in casts_of(gm))


def test_additive_masks_saturate(tools):
    def f(q, mask):
        return F.scaled_dot_product_attention(q, q, q, attn_mask=mask)

    q = torch.randn(1, 1, 3, 4)
    mask = torch.full((3, 3), torch.finfo(torch.float32).min)
    gm = tools.rewritten(tools.traced(f, q, mask), tools.context())
    assert [node.args[0].name for node in gm.graph.nodes if node.target is cast_saturating] == ["mask"]
    assert torch.isfinite(gm(q, mask)).all()  # as -inf a fully masked row gives NaN


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("extreme", [None, torch.finfo(torch.float32).min, 7e4, -torch.inf, torch.inf, torch.nan])
def test_a_mask_is_cast_alike_whoever_looks_on(dtype, extreme):
    """Numbers to the bit, and the gradient, which what saturates has none of."""
    x = torch.randn(4, 5)
    if extreme is not None:
        x[1, 2] = extreme
    limits, low = torch.finfo(dtype), x.to(dtype)
    right = low if x.isinf().any() or x.isnan().any() else x.clamp(limits.min, limits.max).to(dtype)
    fits = (x.abs() <= limits.max) | ~x.isfinite()
    weights = torch.randint(-4, 5, (4, 5)).float()

    def weighed(x):
        return (cast_saturating(x, dtype).float() * weights).nan_to_num(0, 0, 0)

    ways = {
        "call": cast_saturating(x, dtype),
        "vmap": torch.vmap(lambda x: cast_saturating(x, dtype))(x),
        "jvp": torch.func.jvp(lambda x: cast_saturating(x, dtype), (x,), (torch.ones_like(x),))[0],
        "make_fx": make_fx(lambda x: cast_saturating(x, dtype))(torch.randn(4, 5))(x),
    }
    for name, found in ways.items():
        assert found.dtype is dtype and torch.allclose(found, right, 0, 0, equal_nan=True), name
    leaf = x.clone().requires_grad_()
    weighed(leaf).sum().backward()
    if extreme is None or abs(extreme) < torch.inf:
        assert torch.equal(leaf.grad, torch.where(fits, weights, 0.0))


def test_a_fake_mask_is_cast_where_its_mode_is_over():
    fake = FakeTensorMode().from_tensor(torch.randn(2, 3))
    assert cast_saturating(fake, torch.bfloat16).dtype is torch.bfloat16


def test_outputs_get_their_original_dtype_back(tools):
    def f(x, w):
        return {"y": x @ w, "n": x.shape[0]}

    inputs = (torch.randn(2, 2), torch.randn(2, 2))
    gm = tools.rewritten(tools.traced(f, *inputs), tools.context())
    assert gm(*inputs)["y"].dtype is torch.float32
    gm = tools.rewritten(tools.traced(f, *inputs), tools.context(keep_output_dtype=False))
    assert gm(*inputs)["y"].dtype is torch.bfloat16


def test_native_promotion_needs_no_cast(tools):
    def f(x, w):
        return x + x @ w

    inputs = (torch.randn(2, 2), torch.randn(2, 2))
    gm = tools.rewritten(tools.traced(f, *inputs), tools.context())
    assert all(node.args[1] is torch.bfloat16 for node in casts_of(gm))


def test_no_pass_leaves_an_idle_cast(tools):
    def f(x, w):
        return F.linear(F.linear(x, w).float(), w)

    gm = tools.rewritten(tools.traced(f, torch.randn(2, 2), torch.randn(2, 2)), tools.context())
    assert [node.target for node in casts_of(gm)].count(cast) == 3  # x, w, and the output back


class Bits(Exp):
    def forward(self, x):
        h = F.linear(x, self.w)
        return (h.view(torch.int32) & -65536).view(h.dtype)


def test_bits_are_of_the_original_dtype_and_become_it(tools):
    gm = tools.rewritten(tools.traced(Bits(), torch.randn(2, 4)), tools.context(), until="insert_casts")
    expecttest.assert_expected_inline(
        format_graph(gm),
        """\
%x: float32 = placeholder
%w: float32 = get_attr[w]
%x_bf16: bfloat16 = to(%x, torch.bfloat16)
%w_bf16: bfloat16 = to(%w, torch.bfloat16)
%linear: bfloat16 = linear(%x_bf16, %w_bf16)
%linear_f32: float32 = to(%linear, torch.float32)
%view: int32 = view(%linear_f32, torch.int32)
%and_: int32 = bitwise_and(%view, -65536)
%getattr_1: - = getattr(%linear, 'dtype')
%view_1: float32 = view(%and_, torch.float32)
return %view_1""",
    )
