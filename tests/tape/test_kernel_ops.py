"""``fxprec.kernels`` in the reference: what came into a forward or a backward has its part in the results."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fxprec.kernels as kernels
from fxprec.kernels.calls.depthwise_conv2d import DEPTHWISE
from fxprec.kernels.calls.layer_norm import layer_norm
from fxprec.kernels.launch.kernel_op import _KERNELS
from fxprec.kernels.nn.max_pool import max_pool2d
from fxprec.tape.adjoint import measured, terms
from fxprec.tape.exact_ops import EXACT
from fxprec.tape.recorder import OpRecorder
from kernel_tools import DEVICES, INTERPRETING, run_in_the_interpreter

cases = pytest.mark.parametrize("device", DEVICES if INTERPRETING else ["cpu", *DEVICES])
_LABELS = torch.randint(7, (12,), generator=torch.Generator().manual_seed(0))
_LABELS[3] = -100
_TARGET = torch.randn(12, 7, generator=torch.Generator().manual_seed(1)).softmax(1)
_WEIGHTS = torch.rand(7, generator=torch.Generator().manual_seed(2)) + 0.5
_IMAGES = [(3, 4, 5, 5), (4,), (4,)]


def on(x: Tensor, like: Tensor) -> Tensor:
    return x.to(like.device)


def batch_norm(training: bool, relu: bool = False) -> Callable[..., Tensor]:
    def run(x: Tensor, w: Tensor, b: Tensor, residual: Tensor | None = None) -> Tensor:
        mean, var = x.new_full((4,), 0.1, dtype=torch.float32), x.new_full((4,), 0.8, dtype=torch.float32)
        return kernels.batch_norm(x, mean, var, w, b, training=training, residual=residual, relu=relu)

    return run


def cross_entropy(target: Tensor = _LABELS, weight: Tensor | None = None, **options: Any) -> Callable[..., Tensor]:
    def run(x: Tensor) -> Tensor:
        own = None if weight is None else on(weight, x)
        return kernels.cross_entropy(x, on(target, x), own, **options)

    return run


def linear(**options: Any) -> Callable[..., Tensor]:
    return lambda x, w, b: kernels.linear_cross_entropy(x, w, on(_LABELS, x), b, **options)


def rope(q: Tensor, k: Tensor) -> Tensor:
    angles = torch.arange(48.0, device=q.device).view(6, 8)
    return torch.cat(kernels.rope_qk(q, k, angles.cos(), angles.sin()))


#: Name -> the function of rounded tensors, and their shapes.
CASES: dict[str, tuple[Callable[..., Tensor], list[tuple[int, ...]]]] = {
    "group norm": (lambda x, w, b: kernels.group_norm(x, 2, w, b), _IMAGES),
    "group norm, silu": (lambda x, w, b: kernels.group_norm(x, 2, w, b, silu=True), _IMAGES),
    "batch norm": (batch_norm(True), _IMAGES),
    "batch norm, evaluated": (batch_norm(False), _IMAGES),
    "batch norm, residual": (batch_norm(True), [*_IMAGES, _IMAGES[0]]),
    "cross entropy": (cross_entropy(weight=_WEIGHTS, label_smoothing=0.1), [(12, 7)]),
    "cross entropy, rows": (cross_entropy(reduction="none", z_loss=0.1), [(12, 7)]),
    "cross entropy, probabilities": (cross_entropy(_TARGET, label_smoothing=0.1), [(12, 7)]),
    "cross entropy, in the forward": (cross_entropy(gradient_in_forward=True, z_loss=0.1), [(12, 7)]),
    "linear cross entropy": (linear(z_loss=0.1), [(12, 16), (7, 16), (7,)]),
    "linear cross entropy, rows": (linear(reduction="none", label_smoothing=0.1), [(12, 16), (7, 16), (7,)]),
    "max pooling": (lambda x: max_pool2d(x, (3, 3), (2, 2), (1, 1)), [(3, 4, 5, 5)]),
    "depthwise": (
        lambda x, w, b: DEPTHWISE(x, w, b, [2, 2], [2, 2], [1, 1]),
        [(3, 4, 9, 9), (4, 1, 5, 5), (4,)],
    ),
    # Of at most 64 rows it is torch's own.
    "layer norm": (lambda x, w, b: layer_norm(x, (16,), w, b, 1e-5), [(6, 12, 16), (16,), (16,)]),
    "rope": (rope, [(2, 3, 6, 8), (2, 3, 6, 8)]),
}


@pytest.mark.slow
def test_in_the_interpreter() -> None:
    run_in_the_interpreter(__file__)


@cases
@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_what_came_in_has_its_part(name: str, gradients: bool, device: str) -> None:
    function, shapes = CASES[name]
    torch.manual_seed(0)
    exact = [torch.randn(shape, device=device) for shape in shapes]
    recorder = OpRecorder(torch.float64)
    with recorder:
        low = [each.to(torch.bfloat16) for each in exact]
        inputs = [each.detach().requires_grad_() for each in low]
        out = function(*inputs)
        found = [out.detach()]
        if gradients:
            found = [*torch.autograd.grad(out, inputs, torch.randn(out.shape, device=device).to(out.dtype))]
    targets = [(recorder.memory.place(each), torch.randn_like(each, dtype=torch.float64)) for each in found]
    error, parts = measured(recorder, targets), defaultdict[str, float](float)
    for term in terms(recorder, targets):
        parts["of casts" if term.operation.keeps_values else "own"] += abs(term.rounding)
        parts["bend"] += abs(term.bend)
        parts["all"] += term.rounding + term.bend
        assert not term.lacking and not term.operation.why_inexact
    assert parts["all"] == pytest.approx(error, rel=1e-6)
    assert parts["of casts"] > 10 * parts["bend"] and parts["own"] < 10 * parts["of casts"]


def test_every_backward_kernel_has_a_form_with_derivatives() -> None:
    """But the statistics of batch norm, which its forward takes for functions of its input."""
    own = [op for op in _KERNELS.values() if op.launch.__module__.startswith("fxprec.kernels.nn.")]
    assert {op.name for op in own if op._apply is None} <= {name.partition("::")[2] for name in EXACT} | {
        "batch_norm_statistics"
    }
