"""Of every op of torch the columns add up: its own, and those of the casts before it."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_leaves, tree_map

from fxprec.tape import vjp
from fxprec.tape.adjoint import measured, terms
from fxprec.tape.exact_ops import EXACT, draws
from fxprec.tape.memory import TensorPlace
from fxprec.tape.operation import Operation, OpOrigin
from fxprec.tape.recorder import OpRecorder
from fxprec.tape.vjp import _LINEAR, _PRODUCTS, OpResult, inner, pull
from fxprec.torch_internals import aten_to_copy

OPS = [
    op
    for op in op_db
    if op.supports_dtype(torch.bfloat16, "cpu") and not op.name.startswith("jiterator")  # which wants CUDA
]
#: Not judged, and why.
LEFT_OUT = {
    "empty_like": "its values are no function of anything",
    "new_empty": "its values are no function of anything",
    "new_empty_strided": "its values are no function of anything",
    "empty_permuted": "its values are no function of anything",
    "empty_strided": "its values are no function of anything",
    "empty": "its values are no function of anything",
    "resize_": "gives memory another size, which the ledger remarks on",
    "resize_as_": "gives memory another size, which the ledger remarks on",
    "special.entr": "-inf below 0, where its derivative is no number",
}


#: What is rounded in FP32, the errors that the memory keeps and derivatives of products: 2^-24 of errors, 2^-3 or less.
KEPT = 2.0**-24 * 2.0**-3


def lowered(value: Any) -> Any:
    plain = isinstance(value, Tensor) and value.dtype is torch.float32 and value.layout is torch.strided
    return value.to(torch.bfloat16) if plain else value


def is_float(value: object) -> bool:
    return (
        isinstance(value, Tensor) and value.is_floating_point() and value.layout is torch.strided and value.numel() > 0
    )


def added_up(recorder: OpRecorder, results: Any) -> tuple[float, float, float] | None:
    """Measured, explained, and the size of the target: a sum of all floats with random weights."""
    places = [recorder.memory.place(each) for each in tree_leaves(results) if is_float(each)]
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(place.size, generator=generator, dtype=torch.float64) for place in places]
    targets = [*zip(places, weights, strict=True)]
    error = measured(recorder, targets)
    if not places or not math.isfinite(error):
        return None
    size = sum(float((weight * recorder.memory.exact(place)).abs().nan_to_num(0, 0).sum()) for place, weight in targets)
    explained = 0.0
    for term in terms(recorder, targets):
        explained += term.rounding + term.bend
        if term.operation.name in _LINEAR:
            assert abs(term.bend) <= KEPT * max(size, 1e-3), f"{term.operation.name} is linear"
    return error, explained, size


@pytest.mark.parametrize("op", OPS, ids=lambda op: f"{op.name}-{op.variant_test_name}")
def test_columns_of_an_op_add_up(op: Any) -> None:
    if op.name in LEFT_OUT:
        pytest.skip(LEFT_OUT[op.name])
    judged = 0
    samples = op.sample_inputs_func(op, "cpu", torch.float32, False)  # op.sample_inputs seeds before each: 0.1 s
    for sample in itertools.islice(samples, 2):
        recorder = OpRecorder(torch.float64)
        torch.manual_seed(0)
        with recorder, torch.no_grad():
            args, kwargs = tree_map(lowered, ((sample.input, *sample.args), sample.kwargs))
            try:
                results = op(*args, **kwargs)
            except (RuntimeError, NotImplementedError):  # mixed dtypes
                continue
        assert not [each.name for each in recorder.operations if each.why_inexact]
        found = added_up(recorder, results)
        if found is not None:
            error, explained, size = found
            assert abs(explained - error) <= 1e-11 * max(size, 1e-3)
            judged += 1
    if not judged:
        pytest.skip("no sample in bfloat16 has a finite float result")


def test_a_mask_of_infinities_has_no_error() -> None:
    recorder = OpRecorder(torch.float64)
    scores, mask = torch.randn(4, 9), torch.zeros(4, 9).index_fill(1, torch.tensor([2, 7]), -torch.inf)
    with recorder, torch.no_grad():
        results = (scores.bfloat16() + mask.bfloat16()).softmax(-1)
    found = added_up(recorder, results)
    assert found is not None
    error, explained, _ = found
    assert error != 0 and explained == pytest.approx(error, rel=1e-12)


def test_a_row_that_is_masked_everywhere_has_no_error() -> None:
    """Its derivative is not a number: -inf - -inf."""
    recorder = OpRecorder(torch.float64)
    scores, mask = torch.randn(4, 9), torch.zeros(4, 9, dtype=torch.bool).index_fill(0, torch.tensor([1]), True)
    with recorder, torch.no_grad():
        results = scores.bfloat16().masked_fill(mask, -torch.inf).logsumexp(-1).exp()
    found = added_up(recorder, results)
    assert found is not None
    error, explained, _ = found
    assert error != 0 and explained == pytest.approx(error, rel=1e-12)


ROUTES = {
    "where": lambda x, up: torch.where(up, x.sin(), x.cos()),
    "masked_fill": lambda x, up: x.sin().masked_fill(up, 2),
    "mul": lambda x, up: x.sin() * up,
    "index": lambda x, up: x.sin()[up.long()],
    "index_select": lambda x, up: x.sin().index_select(0, up[0].long()),
    "gather": lambda x, up: x.sin().gather(1, up.long()),
    "embedding": lambda x, up: F.embedding(up.long(), x.sin()),
    "index_put": lambda x, up: x.sin().index_put((up[:, 0].long(),), x.cos(), accumulate=True),
    "scatter": lambda x, up: x.sin().scatter(1, up.long(), x.cos()),
    "topk": lambda x, up: x.sin().gather(1, (up * 9.0 + torch.arange(7)).topk(3).indices),
}


@pytest.mark.parametrize("name", ROUTES)
def test_what_is_decided_otherwise_bends(name: str) -> None:
    """``up`` is False all over in the reference, whose casts change nothing."""
    x = torch.randn(5, 7, generator=torch.Generator().manual_seed(1))
    recorder = OpRecorder(torch.float64)
    with recorder, torch.no_grad():
        up = x.bfloat16().float() > x
        result = ROUTES[name](x.bfloat16(), up)
    place = recorder.memory.place(result)
    weight = torch.randn(place.size, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    error = measured(recorder, [(place, weight)])
    found = [*terms(recorder, [(place, weight)])]
    bend = sum(term.bend for term in found)
    assert up.any() and abs(error) > 0.1
    assert abs(bend - error) <= 0.1 * abs(error), "the error is another route, and next to no rounding"
    assert sum(term.rounding for term in found) + bend == pytest.approx(error, rel=1e-12)


WRITES = {
    "source of a cast": lambda x: (low := x.mul(1.1), cast := low.bfloat16(), low.mul_(3), low + cast)[-1],
    "cast": lambda x: (low := x.mul(1.1), cast := low.bfloat16(), cast.mul_(3), low + cast)[-1],
    "cast of a cast": lambda x: (
        low := x.mul(1.1), cast := low.bfloat16(), wide := cast.float(), cast.add_(1), wide.mul_(2), low * cast + wide
    )[-1],
    "input": lambda x: (low := x.clone(), cast := low.bfloat16(), low.zero_(), low + cast)[-1],
    "transposed": lambda x: (low := x.mul(1.1), cast := low.T.bfloat16(), low[1:].mul_(3), low.T * cast)[-1],
    "part": lambda x: (low := x.mul(1.1), cast := low[1:].bfloat16(), low[:2].mul_(3), low[1:] * cast)[-1],
    "expanded": lambda x: (low := x[:1].mul(1.1).expand(5, -1), cast := low.bfloat16(), cast * low)[-1],
    "in float16 and back": lambda x: (y := x.half(), z := y.float(), z.exp_(), z * y)[-1],
}  # fmt: skip


@pytest.mark.parametrize("name", WRITES)
def test_casts_share_values_until_one_of_both_is_written(name: str) -> None:
    x = torch.randn(5, 7, generator=torch.Generator().manual_seed(1))
    recorder = OpRecorder(torch.float64)
    with recorder, torch.no_grad():
        result = WRITES[name](x)
    wide = torch.Tensor.double
    with pytest.MonkeyPatch.context() as patch:
        for cast in ("bfloat16", "half", "float"):
            patch.setattr(torch.Tensor, cast, lambda t: wide(t).clone())
        expected = WRITES[name](x.double())
    exact = recorder.memory.exact(recorder.memory.place(result))
    torch.testing.assert_close(exact, expected, rtol=KEPT, atol=KEPT)
    found = added_up(recorder, result)
    assert found is not None
    error, explained, size = found
    assert error != 0 and abs(explained - error) <= 1e-12 * size


def test_the_local_error_of_a_product_is_that_of_its_own_rounding() -> None:
    a, b = torch.randn(640, 96), torch.randn(96, 160)
    recorder = OpRecorder(torch.float64)
    with recorder, torch.no_grad():
        result = a.bfloat16() @ b.bfloat16()
    exact = a.bfloat16().double() @ b.bfloat16().double()
    place = recorder.memory.place(result)
    [term] = [t for t in terms(recorder, [(place, torch.ones(640, 160).double())]) if t.operation.name == "aten::mm"]
    assert term.size == pytest.approx(exact.square().sum().item(), rel=1e-12)
    assert term.lost == pytest.approx((result.double() - exact).square().sum().item(), rel=1e-12)


@pytest.mark.parametrize(
    "run",
    [
        lambda x, w: x @ w,
        lambda x, w: x @ w.T,
        lambda x, w: x.T @ w[:, :2],
        lambda x, w: x[:1].expand(4, -1) @ w.T,
        lambda x, w: torch.bmm(x.view(2, 3, 6), w.view(2, 6, 3)),
        lambda x, w: torch.bmm(x.view(2, 3, 6).mT, w.view(2, 6, 3).mT),
        lambda x, w: torch.addmm(x[:, :1], x, w, beta=0.5, alpha=3),
        lambda x, w: torch.addmm(x[0, :6], x, w),
        lambda x, w: torch.baddbmm(x.view(2, 3, 6)[:, :, :1], x.view(2, 3, 6), w.view(2, 6, 3), alpha=2),
        lambda x, w: F.conv2d(x.view(1, 2, 3, 6), w.view(3, 2, 2, 3), w[0, :3], stride=(1, 2), padding=(1, 0)),
        lambda x, w: F.conv1d(x.view(3, 2, 6), w.view(6, 1, 6)[:, :, :3], groups=2, dilation=2),
        lambda x, w: F.conv_transpose2d(x.view(1, 2, 3, 6), w.view(2, 3, 2, 3), output_padding=1, stride=2),
        lambda x, w: x[:0] @ w,
    ],
)  # fmt: skip
def test_products_have_no_bend(run: Any) -> None:
    generator = torch.Generator().manual_seed(2)
    x, w = torch.randn(6, 6, generator=generator), torch.randn(6, 6, generator=generator)
    recorder = OpRecorder(torch.float64)
    with recorder, torch.no_grad():
        result = run(x.bfloat16(), w.bfloat16())
    place = recorder.memory.place(result)
    weight = torch.randn(place.size, generator=generator, dtype=torch.float64)
    exact, low = run(x.double(), w.double()), run(x.bfloat16().double(), w.bfloat16().double())
    torch.testing.assert_close(recorder.memory.exact(place), exact, rtol=KEPT, atol=KEPT)
    found = [*terms(recorder, [(place, weight)])]
    own = sum(term.rounding for term in found if "_to_copy" not in term.operation.name)
    casts = sum(term.rounding for term in found if "_to_copy" in term.operation.name)
    assert own == pytest.approx((weight * (result.double() - low)).sum().item(), abs=KEPT)
    assert casts == pytest.approx((weight * (low - exact)).sum().item(), abs=KEPT)
    assert all(term.bend == 0 for term in found)


@pytest.mark.parametrize(("rows", "columns"), [(5, 3), (3, 5), (1, 4), (4, 1)])
def test_what_a_product_pulls_back_lies_as_what_it_belongs_to(rows: int, columns: int) -> None:
    """So a weight that is read transposed is compared with it, and added to, element by element in memory."""
    generator = torch.Generator().manual_seed(3)
    m, a, b = (torch.randn(2, *size, generator=generator) for size in ((rows, columns), (6, rows), (columns, 6)))
    for x, y in ((a.mT, b.mT), (a.mT.contiguous(), b.mT), (a.mT, b.mT.contiguous())):
        of_x, of_y = _PRODUCTS["aten::bmm"](m, x, y)
        torch.testing.assert_close(of_x, m @ y.mT)
        torch.testing.assert_close(of_y, x.mT @ m)
        if rows > 1 < columns:
            assert (of_x.stride(), of_y.stride()) == (x.stride(), y.stride())


def test_a_cast_to_another_device_is_compared_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """On fake tensors, whose device need not be there; they have no values, which inner products would want."""
    monkeypatch.setattr(vjp, "inner", lambda weight, value: float((weight * value).numel()))
    monkeypatch.setattr(vjp, "difference", torch.sub)
    place = TensorPlace(0, torch.float32, (4,), (1,), 0)
    made = TensorPlace(1, torch.bfloat16, (4,), (1,), 0)
    cast = Operation(aten_to_copy, (place,), None, (0,), (), (made,), (), OpOrigin("outside", ""))
    assert cast.keeps_values
    with FakeTensorMode():
        here, there = (torch.empty(4, dtype=torch.float64, device=device) for device in ("cpu", "cuda"))
        inputs: Any = SimpleNamespace(low=lambda _: here, error=lambda _: here)
        results = {0: OpResult(there, there.bfloat16(), there)}
        ((source, gradient),) = pull(cast, inputs, results, (), {place.storage}).gradients
    assert source == place and gradient.device.type == "cpu"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_what_came_from_the_host_has_its_part() -> None:
    x = torch.randn(50, generator=torch.Generator().manual_seed(5))
    recorder = OpRecorder(torch.float64)
    with recorder, torch.no_grad():
        result = x.bfloat16().cuda().float().square()
    targets = [(recorder.memory.place(result), torch.ones_like(result, dtype=torch.float64))]
    error = measured(recorder, targets)
    assert error and sum(term.rounding + term.bend for term in terms(recorder, targets)) == pytest.approx(error)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_inner_products_in_any_layout(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(4)
    weight, value = (torch.randn(3, 4, 5, generator=generator, dtype=dtype) for _ in range(2))
    expected = (weight * value).sum().item()
    for order in ((0, 1, 2), (2, 0, 1), (1, 2, 0)):
        w, v = weight.permute(order), value.permute(order)
        assert inner(w, v) == pytest.approx(expected, rel=1e-5)
        assert inner(w.contiguous(), v) == pytest.approx(expected, rel=1e-5)
    spread = weight[:1].expand(3, 4, 5)
    assert inner(spread, value[:1].expand(3, 4, 5)) == pytest.approx(3 * (weight[0] * value[0]).sum().item(), rel=1e-5)


_aten = torch.ops.aten
_Q, _PHILOX = torch.ones(1, 1, 2, 4), torch.zeros((), dtype=torch.int64)


@pytest.mark.parametrize(
    ("function", "args", "kwargs", "expected"),
    [
        (_aten.rand.default, ([2],), {}, True),
        (_aten.bernoulli_.float, (torch.ones(2), 0.5), {}, True),
        (_aten.native_dropout.default, (torch.ones(2), 0.5, True), {}, False),  # told its draws, it computes
        (_aten.mm.default, (torch.ones(2, 2), torch.ones(2, 2)), {}, False),
        (_aten._scaled_dot_product_flash_attention_for_cpu.default, (_Q, _Q, _Q), {}, False),
        (_aten._scaled_dot_product_flash_attention_for_cpu.default, (_Q, _Q, _Q), {"attn_mask": _Q}, False),
        (_aten._scaled_dot_product_flash_attention_for_cpu.default, (_Q, _Q, _Q, 0.1), {}, True),
        (_aten._scaled_dot_product_flash_attention_for_cpu.default, (_Q, _Q, _Q), {"dropout_p": 0.1}, True),
        (_aten._scaled_dot_product_efficient_attention.default, (_Q, _Q, _Q, None, True), {}, False),
        (_aten._scaled_dot_product_efficient_attention.default, (_Q, _Q, _Q, _Q, True, 0.1), {}, True),
        (
            _aten._scaled_dot_product_efficient_attention_backward.default,
            (_Q, _Q, _Q, _Q, None, _Q, _Q, _PHILOX, _PHILOX, 0.0, [True, True, True, False]), {}, False,
        ),
    ],
)  # fmt: skip
def test_what_draws(function: Any, args: Any, kwargs: Any, expected: bool) -> None:
    assert draws(function, args, kwargs) is expected


SHAPES = [
    (images, channels, size, kernel, stride, padding, dilation)
    for images, channels, size in [(1, 8, (9, 12)), (3, 8, (5, 4)), (70, 9, (7, 6)), (2, 3, (7, 7))]
    for kernel, stride, padding, dilation in [
        ((3, 3), (1, 1), (1, 1), (1, 1)), ((1, 1), (1, 1), (0, 0), (1, 1)), ((2, 3), (1, 2), (0, 2), (2, 1)),
        ((3, 2), (2, 1), (1, 0), (1, 3)),
    ]
]  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_references_own_convolution_is_torchs(shape: Any) -> None:
    images, channels, size, kernel, *options = shape
    x, w = torch.randn(images, channels, *size).double(), torch.randn(5, channels, *kernel).double()
    for bias, groups, memory in [(None, 1, torch.channels_last), (torch.randn(5).double(), 1, torch.contiguous_format)]:
        arguments = (x.to(memory_format=memory), w, bias, *options, False, [0, 0], groups)
        expected = torch.ops.aten.convolution(*arguments)
        torch.testing.assert_close(EXACT["aten::convolution"](*arguments), expected, rtol=1e-13, atol=1e-13)


def test_what_is_kept_of_a_value_is_its_error_in_fp32_unless_that_does_not_tell_it() -> None:
    x = torch.randn(64, generator=torch.Generator().manual_seed(4))
    recorder = OpRecorder(torch.float64)
    with recorder, torch.no_grad():
        made = x.mul(1.1).bfloat16().mul(3)
        too_large = x.half().mul(6e4).mul(6e4)  # inf, and not so in the reference
        written = x.mul(1.3).bfloat16().mul(3).mul_(1.7)
    memory = recorder.memory
    for value, scale in ((made, 3.3), (written, 1.3 * 3 * 1.7)):
        exact = memory.exact(memory.place(value))
        torch.testing.assert_close(exact, x.double() * scale, rtol=1e-9, atol=0)
        assert torch.equal(memory.error(memory.place(value)), value.double() - exact)
    exact = memory.exact(memory.place(too_large))
    assert bool(too_large.isinf().any()) and bool(exact.isfinite().all())
    torch.testing.assert_close(exact, x.double() * 3.6e9, rtol=1e-12, atol=0)
    kept = [storage for storage in memory._errors if memory._errors[storage].dtype is torch.float32]
    assert memory.place(made).storage in kept and memory.place(too_large).storage not in kept
