"""Cross-entropy as a compiled loop: float64's loss and gradients, torch's corner cases, refusals."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fxprec.kernels.cpu.compiled_attention import why_not
from fxprec.kernels.nn.cross_entropy import cross_entropy, reference

BF16 = torch.bfloat16
every_dtype = pytest.mark.parametrize("dtype", [BF16, torch.float32])
pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())

#: Parts of a vector, whole ones, four at once and what is left of them.
COLUMNS = [1, 2, 15, 16, 17, 63, 64, 65, 129, 1040, 5001]
#: (label_smoothing, z_loss)
KINDS = [(0.0, 0.0), (0.1, 0.0), (0.0, 1e-2), (0.2, 1e-2), (1.0, 0.0)]


def inputs(rows: int, columns: int, ignored: int = -100, dtype: torch.dtype = BF16) -> tuple[Tensor, Tensor]:
    logits, target = (torch.randn(rows, columns) * 3 + 2).to(dtype), torch.randint(0, columns, (rows,))
    if rows > 2:
        target[1], target[0], target[2] = ignored, columns - 1, 0
    return logits, target


def gradients(function: Any, logits: Tensor, target: Tensor, upstream: Tensor | None = None, **options: Any) -> Any:
    logits = logits.detach().requires_grad_()
    loss = function(logits, target, **options)
    upstream = torch.ones_like(loss) if upstream is None else upstream.to(loss.dtype)
    return loss.detach(), *torch.autograd.grad(loss, logits, upstream)


def compiled(logits: Tensor, target: Tensor, **options: Any) -> Tensor:
    return cross_entropy(logits, target, compiled=True, **options)


@every_dtype
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize(("smoothing", "z_loss"), KINDS)
def test_loss_and_gradients_are_as_near_to_float64_as_eagers(
    smoothing: float, z_loss: float, reduction: str, dtype: torch.dtype
) -> None:
    options = {"reduction": reduction, "label_smoothing": smoothing, "z_loss": z_loss}
    for columns in COLUMNS:
        for rows in (1, 7):
            logits, target = inputs(rows, columns, dtype=dtype)
            upstream = torch.rand(rows if reduction == "none" else ()) + 0.5
            truth, of_logits = gradients(
                lambda x, y, **kw: reference(x, y, None, **kw), logits.double(), target, upstream, **options
            )
            ours = gradients(compiled, logits, target, upstream, **options)
            theirs = gradients(
                lambda x, y, **kw: reference(x.float(), y, None, **kw), logits, target, upstream, **options
            )
            assert ours[0].dtype is torch.float32 and ours[1].dtype is dtype
            smallest = torch.finfo(dtype).eps / 2
            for mine, eager, exact, eps in zip(ours, theirs, (truth, of_logits), (2**-22, smallest), strict=True):
                bound = eps * exact.abs().max() + 2**-23  # of terms of about 1, which cancel
                assert (mine - exact).abs().max() <= 2 * (eager - exact).abs().max() + bound, (rows, columns)


@every_dtype
def test_of_a_vocabulary_the_loss_and_small_probabilities_are_exact(dtype: torch.dtype) -> None:
    """50,257 classes of which most have next to nothing, and a row of which one is nearly sure."""
    logits, target = inputs(4, 50257, dtype=dtype)
    logits[0, 17], target[0] = 40.0, 17
    exact = gradients(F.cross_entropy, logits.double(), target)
    loss, gradient = gradients(compiled, logits, target)
    assert (loss - exact[0]).abs() < 2**-22 * exact[0]
    kept = exact[1].abs() > 2.0**-120
    assert kept.sum() > 150_000
    kept[0, 17] = False  # p - 1, of which FP32 keeps some digits
    apart = ((gradient.double() - exact[1]) / exact[1]).abs()[kept]
    assert apart.max() < (2**-8 if dtype is BF16 else 2**-17)  # FP32 exponents of some 40 have so many digits


@every_dtype
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_corner_cases_are_torchs(reduction: str, smoothing: float, dtype: torch.dtype) -> None:
    options: dict[str, Any] = {"reduction": reduction, "label_smoothing": smoothing, "ignore_index": 2}

    def same(logits: Tensor, target: Tensor) -> None:
        ours = gradients(compiled, logits, target, **options)
        theirs = gradients(lambda x, y, **kw: F.cross_entropy(x.float(), y, **kw), logits, target, **options)
        torch.testing.assert_close(ours, theirs, equal_nan=True)

    logits, target = inputs(6, 70, ignored=2, dtype=dtype)
    target = torch.where(target == 2, 5, target)
    for value in (math.inf, -math.inf, math.nan):
        for place in (0, 15, 69):
            values, labels = logits.clone(), target.clone()
            values[0, place] = values[3, :] = value
            labels[0] = place
            same(values, labels)
            labels[0] = 7
            same(values, labels)
    ignored = torch.full_like(target, 2)
    same(logits, ignored)  # a mean of NaN
    if not smoothing:  # which torch refuses with uint8
        same(logits, target.to(torch.uint8))
    same(logits[:0], target[:0])
    same(logits[0], target[0])
    same(logits[::2], target[::2])
    same(torch.randn(6, 80).to(dtype)[:, 3:73], target)
    same(logits.t().contiguous().t(), target)
    same(logits.view(2, 70, 3), target.view(2, 3))


def test_a_row_that_is_ignored_is_not_read() -> None:
    logits, target = inputs(5, 33)
    logits[1] = math.nan
    loss, gradient = gradients(compiled, logits, target, label_smoothing=0.1, z_loss=0.1)
    assert loss.isfinite() and gradient.isfinite().all()
    assert not gradient[1].any() and gradient[0].all()


def test_any_number_of_threads_gives_the_same() -> None:
    logits, target = inputs(9, 3001)
    before = torch.get_num_threads()
    try:
        found = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(gradients(compiled, logits, target))
    finally:
        torch.set_num_threads(before)
    assert all(map(torch.equal, found[0], each) for each in found)
    assert torch.equal(found[0][1], found[1][1]) and torch.equal(found[0][1], found[2][1])


def test_bytes_as_labels_count_beyond_their_range() -> None:
    """300 classes are 44 to a byte, and -100 is 156."""
    logits, target = inputs(4, 300)
    target = torch.tensor([1, 156, 156, 255])
    for form in (compiled, cross_entropy):
        loss, gradient = gradients(form, logits, target.to(torch.uint8))
        expected = gradients(compiled, logits, target)
        assert torch.equal(loss, expected[0]) and torch.equal(gradient, expected[1])
        torch.testing.assert_close(loss, F.cross_entropy(logits.float(), target))


@pytest.mark.parametrize("default", [BF16, torch.float64])
def test_any_default_dtype_gives_the_same(default: torch.dtype) -> None:
    logits, target = inputs(5, 70)
    expected = gradients(compiled, logits, target)
    torch.set_default_dtype(default)
    try:
        found = gradients(compiled, logits, target)
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(map(torch.equal, found, expected))


def test_gradients_of_gradients_and_those_of_the_forward() -> None:
    logits, target = inputs(4, 9)
    x, wide = logits.clone().requires_grad_(), logits.double().requires_grad_()
    for each, function in ((x, compiled), (wide, F.cross_entropy)):
        (gradient,) = torch.autograd.grad(function(each, target), each, create_graph=True)
        gradient.square().sum().backward()
    assert x.grad is not None and wide.grad is not None
    torch.testing.assert_close(x.grad, wide.grad.to(BF16), rtol=2**-6, atol=2**-9)
    apart = gradients(compiled, logits, target, reduction="sum")
    at_once = gradients(compiled, logits, target, reduction="sum", gradient_in_forward=True)
    assert all(map(torch.equal, apart, at_once))


@pytest.mark.parametrize("made", [False, True])
def test_opcheck(made: bool) -> None:
    logits, target = inputs(3, 6)
    arguments = (logits.requires_grad_(), target, None, -100, "mean", 0.1, 0.0, True)
    torch.library.opcheck(torch.ops.fxprec.cross_entropy.default, (*arguments, made))
    _, stats, denominator, _ = torch.ops.fxprec.cross_entropy(logits.detach(), *arguments[1:], False)
    given = (torch.ones(()), logits.detach(), target, None, stats, denominator, *arguments[3:], False)
    torch.library.opcheck(torch.ops.fxprec.cross_entropy_backward.default, given)


def test_a_label_that_is_no_class_is_an_error_as_torchs() -> None:
    logits, target = inputs(4, 9)
    for label in (9, -1):
        target[3] = label
        with pytest.raises(IndexError, match=f"Target {label} is out of bounds"):
            compiled(logits, target)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"logits": torch.randn(4, 9).half()}, "torch.float16 on 'cpu'"),
        ({"target": torch.rand(4, 9)}, "a target of torch.float32"),
        ({"weight": torch.ones(9)}, "and class weights"),
        ({"logits": torch.randn(4, 9, dtype=BF16, device="meta"), "target": torch.zeros(4, dtype=int, device="meta")},
         "on 'meta'"),
    ],
)  # fmt: skip
def test_what_it_does_not_serve_is_refused(change: dict[str, Tensor], said: str) -> None:
    logits, target = inputs(4, 9)
    given: dict[str, Any] = {"logits": logits, "target": target} | change
    with pytest.raises(ValueError, match=said):
        cross_entropy(**given, compiled=True)
