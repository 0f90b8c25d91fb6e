"""Cross-entropy: torch's results, gradients and corner cases; in FP32, at any address, as a torch op, in few bytes."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import kernel_tools
from benchmarks.workloads import kernel_bytes
from cubin import usage_of
from fxprec.kernels.nn import cross_entropy_kernels as kernels
from fxprec.kernels.nn import scaled_gradient
from fxprec.kernels.nn.cross_entropy import cross_entropy, reference

DTYPES = [torch.float16, torch.bfloat16, torch.float32]
#: Plain torch, Triton's interpreter, a device.
FORMS = [*([] if kernel_tools.INTERPRETING else [pytest.param("cpu", id="torch")]), *kernel_tools.DEVICES]
every_form = pytest.mark.parametrize("device", FORMS)
every_kernel = pytest.mark.parametrize("device", kernel_tools.DEVICES)
by_hand = pytest.mark.skipif(kernel_tools.INTERPRETING, reason="what torch does around the op, not the kernel")

#: (label_smoothing, z_loss, class weights, probabilities)
KINDS = [
    (0.0, 0.0, False, False),
    (0.0, 1e-2, True, False),
    (0.1, 0.0, False, False),
    (0.1, 1e-2, True, False),
    (0.0, 0.0, False, True),
    (0.2, 1e-2, True, True),
]
#: A short row, rows that share a program, one block at even addresses and at odd ones, two blocks, and three.
SHAPES = [(1, 1), (7, 33), (3, 1040), (2, 1025), (1, 4096), (2, 5001), (1, 8208)]


@pytest.mark.slow
def test_the_kernel_in_the_interpreter() -> None:
    kernel_tools.run_in_the_interpreter(__file__)


def inputs(
    rows: int, columns: int, dtype: torch.dtype, device: str, soft: bool, weighted: bool
) -> tuple[Tensor, Tensor, Any]:
    logits = (torch.randn(rows, columns) * 3 + 2).to(dtype).to(device).requires_grad_()
    target = torch.randn(rows, columns).softmax(1) if soft else torch.randint(0, columns, (rows,))
    if not soft and rows > 2:
        target[1] = -100
    weight = torch.rand(columns).to(device) + 0.1 if weighted else None
    return logits, target.to(device), weight


def gradients(function: Any, logits: Tensor, target: Tensor, weight: Any, upstream: Any, **options: Any) -> Any:
    logits = logits.detach().requires_grad_()
    loss = function(logits, target, weight, **options)
    wanted = [logits, target] if target.requires_grad else [logits]
    upstream = torch.ones_like(loss) if upstream is None else upstream.to(loss.dtype)
    return loss.detach(), *torch.autograd.grad(loss, wanted, upstream)


def eager(logits: Tensor, *args: Any, **options: Any) -> Tensor:
    """What autocast does."""
    return reference(logits.float(), *args, **options)


def error(a: Tensor, truth: Tensor) -> float:
    return (a.double() - truth).abs().max().item()


@every_form
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_loss_and_gradients_are_as_near_to_float64_as_eagers(
    device: str, dtype: torch.dtype, kind: tuple[Any, ...], reduction: str
) -> None:
    smoothing, z_loss, weighted, soft = kind
    options = {"reduction": reduction, "label_smoothing": smoothing, "z_loss": z_loss}
    turn = KINDS.index(kind) + DTYPES.index(dtype) + (reduction == "none")
    for rows, columns in SHAPES[turn % 3 :: 3]:
        logits, target, weight = inputs(rows, columns, dtype, device, soft, weighted)
        target.requires_grad_(soft)
        upstream = torch.rand(rows if reduction == "none" else (), device=device) + 0.5
        truth = gradients(
            reference, logits.double(), target.detach().double().requires_grad_() if soft else target,
            None if weight is None else weight.double(), upstream, **options,
        )  # fmt: skip
        ours = gradients(cross_entropy, logits, target, weight, upstream, **options)
        theirs = gradients(eager, logits, target, weight, upstream, **options)
        assert ours[0].dtype == torch.float32 and ours[1].dtype == dtype
        for a, b, exact, eps in zip(ours, theirs, truth, (2**-22, torch.finfo(dtype).eps, 2**-22), strict=False):
            bound = eps * exact.abs().max().item() + 2**-23  # of terms of about 1, which cancel
            assert error(a, exact) <= 2 * error(b, exact) + bound, (rows, columns)


@every_form
@pytest.mark.parametrize(
    ("kind", "reduction"),
    [*((kind, "mean") for kind in KINDS), (KINDS[3], "sum"), (KINDS[0], "none"), (KINDS[5], "none")],
)
def test_corner_cases_are_torchs(device: str, kind: tuple[Any, ...], reduction: str) -> None:
    smoothing, _, weighted, soft = kind
    options: dict[str, Any] = {"reduction": reduction, "label_smoothing": smoothing}
    if not soft:
        options["ignore_index"] = 2

    def same(logits: Tensor, target: Tensor, weight: Tensor | None) -> None:
        ours, ours_gradient = gradients(cross_entropy, logits, target, weight, None, **options)
        theirs, their_gradient = gradients(F.cross_entropy, logits, target, weight, None, **options)
        torch.testing.assert_close(ours, theirs, equal_nan=True)
        torch.testing.assert_close(ours_gradient, their_gradient, equal_nan=True)

    logits, target, weight = inputs(6, 9, torch.float32, device, soft, weighted)
    target = target if soft else target.masked_fill(target == -100, 2)
    for value in (math.inf, -math.inf, math.nan):
        values = logits.detach().clone()
        values[0, 3] = values[3, :] = value
        if not soft:
            target = target.clone()
            target[0], target[3] = 3, 4
            if value == value:  # of a NaN in an ignored row torch makes a gradient of NaN
                target[4] = 2
        same(values, target, weight)
    if not soft:
        same(logits, torch.full_like(target, 2), weight)  # all ignored: a mean of NaN
        if not smoothing:  # which torch refuses with uint8 and weights
            same(logits, target.to(torch.uint8), weight)
    same(logits[:0], target[:0], weight)
    same(logits[:1], target[:1], weight)
    same(logits[0], target[0], weight)
    same(logits.view(2, 9, 3), target.view(2, 9, 3) if soft else target.view(2, 3), weight)
    same(logits.view(1, 9, 3, 2), target.view(1, 9, 3, 2) if soft else target.view(1, 3, 2), weight)
    if not soft and weight is not None:
        same(logits, target, weight * 0)
        same(logits, target, weight * (torch.arange(9, device=device) % 2))


@every_form
@pytest.mark.parametrize("smoothing", [0.0, 1.0])
def test_all_of_a_label_can_be_smoothed_away(device: str, smoothing: float) -> None:
    logits, target, _ = inputs(5, 40, torch.float32, device, False, False)
    ours = cross_entropy(logits, target, label_smoothing=smoothing)
    torch.testing.assert_close(ours, F.cross_entropy(logits, target, label_smoothing=smoothing))


@every_form
@pytest.mark.parametrize("columns", [5, 5000])
def test_minus_infinity_masks_a_class_and_whole_blocks(device: str, columns: int) -> None:
    logits, target, _ = inputs(3, columns, torch.float32, device, False, False)
    logits = logits.detach()
    logits[:, : columns - 2] = -math.inf
    target[:] = columns - 1
    ours, ours_gradient = gradients(cross_entropy, logits, target, None, None)
    theirs, their_gradient = gradients(F.cross_entropy, logits, target, None, None)
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(ours_gradient, their_gradient)


@every_form
@pytest.mark.parametrize("kind", KINDS[:4:2])
@pytest.mark.parametrize("columns", [40, 5000])
def test_logits_far_from_zero_lose_nothing(device: str, columns: int, kind: tuple[Any, ...]) -> None:
    logits, target, _ = inputs(3, columns, torch.float32, device, False, False)
    far = logits.detach() + 30000.0
    ours, gradient = gradients(cross_entropy, far, target, None, None, label_smoothing=kind[0])
    truth, exact = gradients(reference, far.double(), target, None, None, label_smoothing=kind[0])
    assert ours.item() == pytest.approx(truth.item(), rel=2e-6)
    torch.testing.assert_close(gradient.double(), exact, rtol=1e-5, atol=1e-9)


@every_form
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_an_ignored_row_is_not_read(device: str, smoothing: float) -> None:
    logits, target, _ = inputs(4, 1100, torch.float16, device, False, False)
    logits = logits.detach()
    logits[1] = math.nan
    for made in (False, True):
        options = {"gradient_in_forward": made, "label_smoothing": smoothing}
        loss, gradient = gradients(cross_entropy, logits, target, None, None, **options)
        assert math.isfinite(loss.item()) and gradient.isfinite().all() and not gradient[1].any()


@every_kernel
@pytest.mark.parametrize("label", [40, 1 << 40, -1, -(1 << 40)])
@pytest.mark.parametrize("made", [False, True])
def test_a_label_that_is_no_class_reads_nothing_and_is_nan(device: str, label: int, made: bool) -> None:
    for weighted in (False, True):
        logits, target, weight = inputs(4, 40, torch.float32, device, False, weighted)
        target[0] = label
        loss, gradient = gradients(
            cross_entropy, logits, target, weight, None, reduction="sum", gradient_in_forward=made
        )  # fmt: skip
        assert loss.isnan() and gradient[0].isnan().all() and gradient[1:].isfinite().all()
        assert cross_entropy(logits, target, weight).isnan()


@by_hand
def test_a_label_that_is_no_class_raises_on_a_cpu_as_in_torch() -> None:
    with pytest.raises(IndexError, match="Target 9 is out of bounds"):
        cross_entropy(torch.randn(2, 9), torch.tensor([0, 9]))


@every_form
@pytest.mark.parametrize("columns", [40, 4801])
@pytest.mark.parametrize("offset", [0, 3, 8])
def test_rows_of_any_distance_at_any_address(device: str, columns: int, offset: int) -> None:
    for kind in (KINDS[0], KINDS[5]):
        smoothing, z_loss, weighted, soft = kind
        plain, target, weight = inputs(3, columns, torch.float16, device, soft, weighted)
        memory = torch.full((3, columns + 13), math.nan, device=device, dtype=torch.float16)
        strided = memory[:, offset : offset + columns]
        strided.copy_(plain.detach())
        options = {"label_smoothing": smoothing, "z_loss": z_loss}
        ours = gradients(cross_entropy, strided, target, weight, None, **options)
        theirs = gradients(cross_entropy, plain, target, weight, None, **options)
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=2e-3 if a.dtype == torch.float16 else 1e-5, atol=1e-6)
        assert memory[:, :offset].isnan().all() and memory[:, offset + columns :].isnan().all()


@every_form
def test_a_gradient_that_is_one_number_for_all_rows(device: str) -> None:
    logits, target, _ = inputs(4, 33, torch.float32, device, False, False)
    loss = cross_entropy(logits, target, reduction="none")
    (ours,) = torch.autograd.grad(loss.sum(), logits)
    (theirs,) = torch.autograd.grad(F.cross_entropy(logits, target, reduction="sum"), logits)
    torch.testing.assert_close(ours, theirs)


@every_form
def test_classes_that_are_not_next_to_each_other(device: str) -> None:
    target = torch.randint(0, 6, (2, 5), device=device)
    for logits in (torch.randn(2, 6, 5), torch.randn(2, 5, 6).movedim(-1, 1), torch.randn(6, 2, 5).movedim(0, 1)):
        logits = logits.to(device)
        ours = gradients(cross_entropy, logits, target, None, None, reduction="none")
        theirs = gradients(F.cross_entropy, logits, target, None, None, reduction="none")
        torch.testing.assert_close(ours, theirs)


# The gradient in the forward


@every_form
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_gradient_of_the_forward_is_that_of_the_backward(device: str, dtype: torch.dtype, reduction: str) -> None:
    turn = DTYPES.index(dtype) + (reduction == "sum")
    for i, (rows, columns) in enumerate([(7, 33), (2, 1025), (2, 5001)]):
        for smoothing, z_loss, weighted, soft in KINDS[(i + turn) % 3 :: 3]:
            given = inputs(rows, columns, dtype, device, soft, weighted)
            options = {"label_smoothing": smoothing, "z_loss": z_loss, "reduction": reduction}
            ours, gradient = gradients(cross_entropy, *given, None, gradient_in_forward=True, **options)
            truth, exact = gradients(reference, given[0].double(), *given[1:], None, **options)
            torch.testing.assert_close(ours.double(), truth, rtol=1e-5, atol=1e-5)
            bound = torch.finfo(dtype).eps * exact.abs().max().item()
            assert error(gradient, exact) <= bound + 2e-7, (rows, columns, soft)


@every_form
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_gradient_of_the_forward_is_scaled_once_for_each_backward(device: str, dtype: torch.dtype) -> None:
    logits, target, _ = inputs(6, 40, dtype, device, False, False)
    (wanted,) = torch.autograd.grad(cross_entropy(logits, target) * 8, logits)
    loss = cross_entropy(logits, target, gradient_in_forward=True) * 8
    found = [torch.autograd.grad(loss, logits, retain_graph=again)[0] for again in (True, True, False)]
    for gradient in found:
        torch.testing.assert_close(gradient, wanted, rtol=1e-2 if dtype == torch.bfloat16 else 2e-3, atol=1e-6)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
    assert found[0].data_ptr() != found[1].data_ptr()


@every_form
def test_a_gradient_of_the_forward_is_saved_instead_of_the_logits(device: str) -> None:
    logits, target, _ = inputs(6, 40, torch.bfloat16, device, False, False)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        loss = cross_entropy(logits, target, gradient_in_forward=True)
    (large,) = [t for t in saved if t.shape == logits.shape]
    assert large.data_ptr() != logits.data_ptr()
    before = large.clone()
    (gradient,) = torch.autograd.grad(loss, logits)
    assert torch.equal(gradient, before) and not gradient.requires_grad


@every_form
def test_a_gradient_of_the_forward_is_overwritten_only_where_nobody_else_holds_it(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits, target, _ = inputs(6, 40, torch.bfloat16, device, False, False)
    overwritten: list[bool] = []
    launched = scaled_gradient._launch
    monkeypatch.setattr(
        scaled_gradient, "_launch", lambda *args: (overwritten.append(args[0] is args[3]), launched(*args))
    )
    loss = cross_entropy(logits, target, gradient_in_forward=True) * 2
    for again in (True, False):
        (gradient,) = torch.autograd.grad(loss, logits, retain_graph=again)
        assert not gradient.requires_grad
    loss, *_, made = torch.ops.fxprec.cross_entropy(logits, target, None, -100, "mean", 0.0, 0.0, False, True)
    before = made.clone()
    (loss * 2).backward()
    assert overwritten == [False, True, False]
    assert torch.equal(made, before) and torch.equal(logits.grad, before * 2)  # type: ignore[arg-type]


@every_form
def test_float16_gradients_of_a_long_mean_outlive_the_forward(device: str) -> None:
    """One 1024th of a small probability is nothing in float16, until the loss scale multiplies it.

    The other classes' gradients may be off by a rounding of float16: of the result, 2^-11 of it, or of what the forward
    has kept, a sum's gradient among the subnormal numbers, 2^-25 of 1. Each probability has a few roundings of FP32
    besides, most of them in an exponent of 12 log2(e): under 2^-18 together.

    The label's own gradient is p - 1, in which 1e-4 is left of numbers near 1. There what FP32 rounds at 1 counts: 15
    additions of 16 terms, in whatever order, 2^-24 each, and an exponential function of two units, as many again.
    """
    logits = torch.zeros(1024, 16, dtype=torch.float16, device=device)
    logits[:, 0] = 12.0
    target = torch.zeros(1024, dtype=torch.int64, device=device)
    for made in (False, True):
        scale = torch.tensor(65536.0, device=device)
        _, gradient = gradients(cross_entropy, logits, target, None, scale, gradient_in_forward=made)
        _, exact = gradients(reference, logits.double(), target, None, scale)
        step = 65536 / 1024
        kept = 2.0**-25 * step if made else 0.0
        torch.testing.assert_close(gradient[:, 1:].double(), exact[:, 1:], rtol=2.0**-11 + 2.0**-18, atol=kept)
        torch.testing.assert_close(
            gradient[:, 0].double(), exact[:, 0], rtol=2.0**-11, atol=kept + step * (15 + 2) * 2.0**-24
        )
    assert not gradients(cross_entropy, logits, target, None, None)[1].half().mul(65536)[:, 1].eq(exact[0, 1]).any()


@every_form
def test_a_mean_of_no_label_at_all_has_a_gradient_of_zero_in_the_forward_too(device: str) -> None:
    for dtype in DTYPES:
        logits, target, _ = inputs(3, 9, dtype, device, False, False)
        loss, gradient = gradients(cross_entropy, logits, target.fill_(-100), None, None, gradient_in_forward=True)
        assert loss.isnan() and not gradient.any()


@by_hand
def test_a_gradient_of_the_forward_cannot_be_differentiated_and_says_so() -> None:
    logits, target, _ = inputs(3, 5, torch.float32, "cpu", False, False)
    loss = cross_entropy(logits, target, gradient_in_forward=True)
    with pytest.raises(RuntimeError, match="Leave gradient_in_forward out where create_graph=True"):
        torch.autograd.grad(loss, logits, create_graph=True)


@by_hand
def test_the_forward_makes_a_gradient_only_where_the_logits_alone_want_one() -> None:
    logits, target, _ = inputs(3, 5, torch.float32, "cpu", True, False)
    target.requires_grad_()
    found = gradients(cross_entropy, logits, target, None, None, gradient_in_forward=True)
    torch.testing.assert_close(found, gradients(F.cross_entropy, logits, target, None, None))
    with torch.no_grad():
        assert not cross_entropy(logits, target, gradient_in_forward=True).requires_grad


@every_kernel
def test_the_gradient_may_lie_where_the_logits_do(device: str) -> None:
    for columns in (40, 1100, 5001):
        logits, target, _ = inputs(3, columns, torch.float16, device, False, False)
        logits = logits.detach()
        losses, stats = logits.new_empty(3, dtype=torch.float32), logits.new_empty((3, 3), dtype=torch.float32)
        apart, place = torch.empty_like(logits), logits.clone()
        for x, gradient in ((logits, apart), (place, place)):
            kernels.launch(kernels.LossPass(x, target, None, -100, 0.1, 0.0, stats, losses, gradient=gradient))
        assert torch.equal(place, apart) and apart.any()


# As a torch op


@by_hand
@pytest.mark.parametrize("kind", [KINDS[0], KINDS[3], KINDS[5]])
@pytest.mark.parametrize("made", [False, True])
def test_opcheck(kind: tuple[Any, ...], made: bool) -> None:
    smoothing, z_loss, weighted, soft = kind
    logits, target, weight = inputs(3, 6, torch.float32, "cpu", soft, weighted)
    arguments = (logits, target, weight, -100, "mean", smoothing, z_loss, False)
    torch.library.opcheck(torch.ops.fxprec.cross_entropy.default, (*arguments, made))
    _, stats, denominator, _ = torch.ops.fxprec.cross_entropy(logits.detach(), *arguments[1:], False)
    given = (torch.ones(()), logits.detach(), target, weight, stats, denominator, *arguments[3:], soft)
    torch.library.opcheck(torch.ops.fxprec.cross_entropy_backward.default, given)
    torch.library.opcheck(
        torch.ops.fxprec.scaled_gradient.default, (logits.detach(), torch.ones(()), None, torch.float16)
    )


@by_hand
@pytest.mark.parametrize("made", [False, True])
def test_compiled_exported_and_checkpointed(made: bool) -> None:
    logits, target, _ = inputs(4, 6, torch.bfloat16, "cpu", False, False)

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(x * 2, y, label_smoothing=0.1, gradient_in_forward=made) * 3

    def checkpointed(x: Tensor, y: Tensor) -> Tensor:
        return checkpoint(loss_of, x, y, use_reentrant=False)

    wanted = gradients(lambda x, y, _: loss_of(x, y), logits, target, None, None)
    compiled = torch.compile(loss_of, fullgraph=True, backend="aot_eager")
    for function in (compiled, checkpointed):
        found = gradients(lambda x, y, _, f=function: f(x, y), logits, target, None, None)
        torch.testing.assert_close(found, wanted, rtol=1e-2, atol=1e-3)

    class Loss(torch.nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return loss_of(x, y)

    exported = torch.export.export(Loss(), (logits, target))
    assert "fxprec.cross_entropy.default" in exported.graph_module.code.replace("torch.ops.", "")
    torch.testing.assert_close(exported.module()(logits, target), wanted[0])


@by_hand
@pytest.mark.parametrize("made", [False, True])
def test_func_grad(made: bool) -> None:
    logits, target, _ = inputs(4, 6, torch.float32, "cpu", False, False)

    def loss_of(x: Tensor) -> Tensor:
        return cross_entropy(x, target, z_loss=0.1, gradient_in_forward=made)

    (wanted,) = torch.autograd.grad(reference(logits, target, z_loss=0.1), logits)
    torch.testing.assert_close(torch.func.grad(loss_of)(logits.detach()), wanted)


@by_hand
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_second_derivative_is_eagers(kind: tuple[Any, ...], reduction: str) -> None:
    smoothing, z_loss, weighted, soft = kind
    options = {"reduction": reduction, "label_smoothing": smoothing, "z_loss": z_loss}
    logits, target, weight = inputs(4, 6, torch.float32, "cpu", soft, weighted)
    direction, upstream = torch.randn(4, 6), torch.rand(4 if reduction == "none" else ()).requires_grad_()
    found = []
    for function in (cross_entropy, reference):
        loss = function(logits, target, weight, **options)
        (first,) = torch.autograd.grad(loss, logits, upstream, create_graph=True)
        found.append((first, *torch.autograd.grad((first * direction).sum(), (logits, upstream))))
    torch.testing.assert_close(found[0], found[1])


@by_hand
def test_probabilities_pass_a_gradient_to_class_weights() -> None:
    logits, target, weight = inputs(3, 5, torch.float32, "cpu", True, True)
    weight.requires_grad_()
    ours, theirs = (torch.autograd.grad(f(logits, target, weight), weight) for f in (cross_entropy, F.cross_entropy))
    torch.testing.assert_close(ours, theirs)


X, Y = torch.zeros(4, 5), torch.zeros(4, dtype=torch.int64)


@by_hand
@pytest.mark.parametrize(
    ("arguments", "options", "wanted", "message"),
    [
        (
            (X.double(), Y),
            {},
            TypeError,
            "logits in float32, float16 or bfloat16, got torch.float64.* torch's own",
        ),
        ((X.int(), Y), {}, TypeError, "takes logits in float32"),
        ((X, Y.int()), {}, TypeError, "class indices must be int64 or uint8, got torch.int32"),
        ((X, Y.float()), {}, TypeError, "class indices must be int64 or uint8, got torch.float32"),
        ((X, X.long()), {}, TypeError, "a target of the logits' shape .* is probabilities"),
        ((X, X.double()), {}, TypeError, "takes target in float32"),
        ((X, X), {"ignore_index": 2}, ValueError, "ignore_index .2. has no meaning for probabilities"),
        ((X, Y[:3]), {}, ValueError, r"logits .4, 5. take class indices .4,."),
        ((X[None], Y), {}, ValueError, r"logits .1, 4, 5. take class indices .1, 5."),
        ((X[0, 0], Y[0]), {}, ValueError, "got a 0-dim tensor"),
        ((X[0, 0], Y), {}, ValueError, "got a 0-dim tensor"),
        ((X, Y, torch.ones(4)), {}, ValueError, "weight must be one for each of 5 classes"),
        ((X, Y, torch.ones(5).double()), {}, TypeError, "takes weight in float32"),
        ((X, Y, torch.ones(5).requires_grad_()), {}, RuntimeError, "no gradient for class weights"),
        ((X, Y), {"reduction": "batchmean"}, ValueError, "reduction must be one of none, mean, sum, got 'batchmean'"),
        ((X, Y), {"label_smoothing": 1.5}, ValueError, "label_smoothing must be between 0.0 and 1.0, got 1.5"),
        ((X, Y), {"label_smoothing": -0.1}, ValueError, "label_smoothing must be between"),
        ((X, Y.to("meta")), {}, ValueError, "a target on 'meta', not 'cpu'"),
    ],
)
def test_bad_arguments(arguments: Any, options: Any, wanted: Any, message: str) -> None:
    with pytest.raises(wanted, match=message):
        cross_entropy(*arguments, **options)


# What the compiler makes of it

INTEGERS = ("logits_stride", "target_stride", "count", "columns", "grad_output_stride", "gradient_stride")


def built(mode: str, architecture: int, dtype: str = "bf16", *, even: bool = False, **other: Any) -> Any:
    """The kernel for (block, rows, soft, smoothed, weighted); ``even``: rows start and end at multiples of 16 bytes."""
    from triton import compile
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    forward, backward = "forward" in mode, "backward" in mode
    block, rows, soft = other.get("block", 4096), other.get("rows", 1), other.get("soft", False)
    constants: dict[str, Any] = {
        "SOFT": soft, "SMOOTHED": other.get("smoothed", False), "FORWARD": forward, "BACKWARD": backward,
        "EDGES": not even, "ALIGNED": not even, "WHOLE": other.get("whole", False),
        "VECTOR": 4 if dtype == "fp32" else 8, "ROWS": rows, "BLOCK": block,
    }  # fmt: skip
    absent = [] if other.get("weighted") else ["weight"]
    absent += [] if forward else ["losses", "shares"]
    absent += [] if backward else ["gradient", "grad_output", "denominator"]
    absent += [] if backward and not forward and soft else ["target_gradient"]
    constants |= dict.fromkeys(absent) | ({} if soft else {"target_stride": 1})
    singles = ("weight", "losses", "shares", "stats", "grad_output", "denominator", "target_gradient")
    pointers: dict[str, str] = dict.fromkeys(singles, "*fp32")
    pointers |= {"logits": f"*{dtype}", "gradient": f"*{dtype}", "target": f"*{dtype}" if soft else "*i64"}
    integers = dict.fromkeys((*INTEGERS, "target_gradient_stride"), "i32") | {"ignore_index": "i64"}
    kernel = kernels.cross_entropy_kernel
    types = {
        name: "constexpr" if name in constants else (pointers | integers).get(name, "fp32") for name in kernel.arg_names
    }
    divisible = {"logits_stride", "gradient_stride", "columns", "target_stride"} if even else set()
    attributes = {
        (i,): [["tt.divisibility", 16]]
        for i, (name, kind) in enumerate(types.items())
        if kind.startswith("*") or (name in divisible and (soft or name != "target_stride"))
    }
    source = ASTSource(kernel, types, constexprs=constants, attrs=attributes)
    made = compile(source, target=GPUTarget("cuda", architecture, 32), options={"num_warps": 8})
    taken = usage_of(made.asm["cubin"])
    print(mode, architecture, dtype, even, other, taken)
    return kernel_tools.Compiled(made.asm["ttir"], made.asm["ptx"], taken.registers, taken.local)


def accesses(ptx: str, kind: str) -> int:
    return len(re.findall(rf"{kind}\.global[.\w]*v4\.b32", ptx))


#: For 85 % of the copy bandwidth some 30 KiB must be under way in each multiprocessor: five programs of 8 KiB.
BUSY = 65536 // (5 * 256)
#: Triton 3.8 gives one variant three registers more than that (four programs then), and spills eight bytes in another.
AT_3_8 = {("forward", 100, "bf16", False): (BUSY + 3, 0), ("forward backward", 90, "bf16", False): (64, 8)}


@kernel_tools.compiles
@pytest.mark.parametrize(
    ("architecture", "dtype", "even"),
    [*((a, "bf16", even) for a in kernel_tools.ARCHITECTURES for even in (False, True)), (90, "fp16", False),
     (90, "fp32", False)],
)  # fmt: skip
@pytest.mark.parametrize(
    ("mode", "loads", "stores"), [("forward", 1, 0), ("backward", 1, 1), ("forward backward", 2, 1)]
)
def test_long_rows_move_16_bytes_at_a_time(
    architecture: int, dtype: str, even: bool, mode: str, loads: int, stores: int
) -> None:
    both = mode == "forward backward"
    kernel = built(mode, architecture, dtype, even=even, block=2048 if both or dtype == "fp32" else 4096)
    wide = 1 if both and dtype != "fp32" else 2
    assert (accesses(kernel.ptx, "ld"), accesses(kernel.ptx, "st")) == (wide * loads, wide * stores)
    registers, spills = (64 if both else BUSY, 0)
    if kernel_tools.triton_release() >= (3, 8):
        registers, spills = AT_3_8.get((mode, architecture, dtype, even), (registers, spills))
    assert kernel.spills <= spills and kernel.registers <= registers
    assert not re.search(r"\b(atom|red)\.", kernel.ptx), "an order of its own every time"
    if (
        mode == "forward backward" and dtype != "fp32"
    ):  # all threads have the label's logit before one of them writes over it
        name = dtype.replace("fp", "f")
        chosen = [m.start() for m in re.finditer(rf"tt\.load [^\n]*: tensor<1x!tt\.ptr<{name}>>", kernel.ttir)]
        written = [m.start() for m in re.finditer(rf"tt\.store [^\n]*: tensor<1x\d+x!tt\.ptr<{name}>>", kernel.ttir)]
        assert max(chosen) < kernel.ttir.index("barrier") < min(written)


HEAVY = [{"smoothed": True}, {"smoothed": True, "weighted": True}, {"soft": True, "weighted": True}]


@kernel_tools.compiles
@pytest.mark.parametrize(
    ("architecture", "block", "other", "mode"),
    [
        (architecture, block, other, mode)
        for architecture, block in [(80, 2048), (90, 16), (90, 2048), (100, 2048)]
        for other in HEAVY
        for mode in ["forward", "backward", "forward backward"]
        if not (other.get("weighted") and mode == "forward backward")  # two launches
    ],
    ids=str,
)
def test_no_variant_spills(architecture: int, mode: str, block: int, other: dict[str, Any]) -> None:
    short = block < 2048
    kernel = built(mode, architecture, even=short, block=block, rows=max(1, 2048 // block), whole=short, **other)
    assert kernel.spills == 0 and kernel.registers <= 128
    assert not re.search(r"\b(atom|red)\.", kernel.ptx)


def tiles(ttir: str, dtype: str, block: int) -> tuple[int, int]:
    """How many tiles of logits or gradients are loaded and stored."""
    tile = rf"tensor<1x{block}x!tt\.ptr<{dtype}>>"
    return len(re.findall(rf"tt\.load [^\n]*: {tile}", ttir)), len(re.findall(rf"tt\.store [^\n]*: {tile}", ttir))


@kernel_tools.compiles
def test_the_bytes_moved_are_those_of_the_kernels() -> None:
    rows, columns = 1, 1 << 20
    row = rows * columns * 2

    def whole(bytes_: int) -> int:
        return round(bytes_ / row)

    assert tiles(built("forward", 90, even=True).ttir, "bf16", 4096) == (1, 0)
    assert tiles(built("backward", 90, even=True).ttir, "bf16", 4096) == (1, 1)
    assert [whole(b) for b in kernel_bytes.cross_entropy(rows, columns, torch.bfloat16)] == [1, 2]
    assert tiles(built("forward backward", 90, even=True, whole=True).ttir, "bf16", 4096) == (1, 1)
    assert tiles(built("forward backward", 90, even=True, block=2048).ttir, "bf16", 2048) == (2, 1), "from the cache"
    assert [whole(b) for b in kernel_bytes.cross_entropy(rows, columns, torch.bfloat16, gradient_in_forward=True)] == [
        2,
        0,
    ]
    assert tiles(built("backward", 90, even=True, soft=True).ttir, "bf16", 4096) == (2, 1)
    soft = kernel_bytes.cross_entropy(rows, columns, torch.bfloat16, target=torch.bfloat16)
    assert [whole(b) for b in soft] == [2, 3]
    soft = kernel_bytes.cross_entropy(rows, columns, torch.bfloat16, target=torch.bfloat16, gradient_in_forward=True)
    assert [whole(b) for b in soft] == [5, 0]


@by_hand
def test_the_bytes_moved_are_those_of_the_arguments() -> None:
    """Of all tensors that the launches get and return, each once (a mean's losses and shares are read again)."""
    rows, columns = 64, 100
    logits, target, _ = inputs(rows, columns, torch.bfloat16, "cpu", False, False)
    forward = torch.ops.fxprec.cross_entropy(logits.detach(), target, None, -100, "mean", 0.0, 0.0, False, False)
    losses = 2 * 2 * 4 * rows  # and shares; written, and read by the reduction
    size = sum(t.nbytes for t in (logits, target, forward[1])) + losses
    _, stats, denominator, _ = forward
    backward = torch.ops.fxprec.cross_entropy_backward(
        torch.ones(()), logits.detach(), target, None, stats, denominator, -100, "mean", 0.0, 0.0, False, False
    )
    size_of_backward = sum(t.nbytes for t in (logits, target, stats, backward[0]))
    assert kernel_bytes.cross_entropy(rows, columns, torch.bfloat16) == (size, size_of_backward)
    made = torch.ops.fxprec.cross_entropy(logits.detach(), target, None, -100, "mean", 0.0, 0.0, False, True)
    size = sum(t.nbytes for t in (logits, target, target, made[1], made[3])) + 2 * 4 * rows
    assert kernel_bytes.cross_entropy(rows, columns, torch.bfloat16, gradient_in_forward=True) == (size, 0)


@by_hand
def test_rows_at_even_addresses_need_no_edges_and_short_ones_share_a_program() -> None:
    def of(columns: int, heavy: bool = False, both: bool = False) -> kernels.RowTiling:
        return kernels.row_tiling(torch.empty(4, columns, dtype=torch.bfloat16), heavy, both)

    assert of(128256) == kernels.RowTiling(edges=False, whole=False, rows=1, block=4096, warps=8)
    assert of(128256, True) == kernels.RowTiling(edges=False, whole=False, rows=1, block=2048, warps=8)
    assert of(50257) == kernels.RowTiling(edges=True, whole=False, rows=1, block=4096, warps=8)
    assert of(4096) == kernels.RowTiling(edges=False, whole=True, rows=1, block=4096, warps=8)
    assert of(4096, both=True) == of(4096) and of(128256, both=True) == of(128256, True)
    assert of(4095, both=True) == kernels.RowTiling(edges=True, whole=False, rows=1, block=2048, warps=8)
    assert of(1000) == kernels.RowTiling(edges=False, whole=True, rows=2, block=1024, warps=4)
    assert of(10) == kernels.RowTiling(edges=False, whole=True, rows=128, block=16, warps=4)
    assert kernels.row_tiling(torch.empty(4, 50304, dtype=torch.float16)[:, :50257]).edges


@by_hand
def test_a_gradient_starts_as_its_logits_do_only_where_each_row_does() -> None:
    rows = torch.empty(4, 1003, dtype=torch.float16)
    assert kernels.starts_alike(rows, torch.empty_like(rows))
    assert kernels.starts_alike(rows, rows.new_empty(4, 1011)[:, 8:])
    assert not kernels.starts_alike(rows, rows.new_empty(4, 1003 + 4)[:, :1003])
    assert not kernels.starts_alike(rows, rows.new_empty(4 * 1003 + 1)[1:].view(4, 1003))
    assert not kernels.starts_alike(rows, rows.float())
