"""What ``benchmarks.kernels`` times: a hand-written kernel at one shape, beside what eager mode runs in its place.

The eager form is written as a model would have it, and ends in the cast that the next matmul would make, where autocast
leaves FP32: both then give the same dtypes. Inputs are random, activations low and parameters FP32.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.workloads import kernel_bytes
from fxprec.kernels.nn import (
    batch_norm,
    cross_entropy,
    group_norm,
    linear_cross_entropy,
    max_pool,
    rope,
)

__all__ = ["PROBLEMS", "Problem", "Setup", "Source"]


@dataclass(frozen=True)
class Setup:
    """Where and how large. ``tiny``: sizes that a CPU runs in no time, odd ones among them."""

    device: torch.device
    low: torch.dtype
    tiny: bool = False

    def size(self, full: int, tiny: int) -> int:
        return tiny if self.tiny else full

    def activation(self, *shape: int, wanted: bool = True) -> Tensor:
        return torch.randn(shape, device=self.device, dtype=self.low).requires_grad_(wanted)

    def parameter(self, *shape: int) -> Tensor:
        return (0.5 + torch.rand(shape, device=self.device)).requires_grad_()

    def labels(self, count: int, classes: int) -> Tensor:
        return torch.randint(classes, (count,), device=self.device)


@dataclass(frozen=True)
class Problem:
    """One kernel at one shape.

    Attributes:
        ours, eager: functions of ``inputs``, which give a tensor or a tuple of them.
        moved: bytes that forward and backward must move; None where arithmetic is the limit.
        autocast: whether ``eager`` runs under torch.autocast; a region's graph has its casts written out.
        compared: whether the results are; not so where something is drawn in any case.
        together: forward and backward are one figure, since the forward makes the gradient.
    """

    kernel: str
    shape: str
    ours: Callable[..., Any]
    eager: Callable[..., Any]
    inputs: tuple[Tensor, ...]
    moved: tuple[int | None, int | None]
    autocast: bool = True
    compared: bool = True
    together: bool = False


@dataclass(frozen=True)
class Source:
    """Where problems come from. ``quick``: among the most important ones."""

    name: str
    make: Callable[[Setup], Iterator[Problem]]
    quick: bool = False


def _text(*sizes: int) -> str:
    return "x".join(map(str, sizes))


# -- losses -----------------------------------------------------------------------------------------------------------


def _cross_entropy(setup: Setup, rows: int, classes: int, early: bool = False) -> Problem:
    rows, classes = setup.size(rows, 6), setup.size(classes, 37)
    logits, target = setup.activation(rows, classes), setup.labels(rows, classes)
    moved = kernel_bytes.cross_entropy(rows, classes, setup.low, gradient_in_forward=early)
    return Problem(
        "cross_entropy, gradient in forward" if early else "cross_entropy", _text(rows, classes),
        lambda x, y: cross_entropy.cross_entropy(x, y, gradient_in_forward=early), F.cross_entropy,
        (logits, target), moved, together=early,
    )  # fmt: skip


def _linear_cross_entropy(setup: Setup, rows: int, features: int, classes: int) -> Problem:
    rows, features, classes = setup.size(rows, 6), setup.size(features, 16), setup.size(classes, 37)
    hidden, target = setup.activation(rows, features), setup.labels(rows, classes)
    weight = (0.05 * torch.randn(classes, features, device=setup.device)).requires_grad_()

    def ours(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
        return linear_cross_entropy.linear_cross_entropy(x, w, y)

    return Problem(
        "linear_cross_entropy", _text(rows, features, classes), ours,
        lambda x, w, y: F.cross_entropy(F.linear(x, w), y), (hidden, weight, target), (None, None), together=True,
    )  # fmt: skip


# -- norms ------------------------------------------------------------------------------------------------------------


def _group_norm(setup: Setup, samples: int, channels: int, side: int) -> Problem:
    samples, channels, side = setup.size(samples, 2), setup.size(channels, 8), setup.size(side, 5)
    groups = setup.size(32, 4)
    x = setup.activation(samples, channels, side, side, wanted=False).to(memory_format=torch.channels_last)
    parameters = (setup.parameter(channels), setup.parameter(channels))
    return Problem(
        "group_norm, silu", _text(*x.shape),
        lambda x, w, b: group_norm.group_norm(x, groups, w, b, silu=True),
        lambda x, w, b: F.silu(F.group_norm(x, groups, w, b)).to(x.dtype),
        (x.requires_grad_(), *parameters), kernel_bytes.group_norm(x.shape, setup.low, (torch.float32,) * 2),
    )  # fmt: skip


def _batch_norm(setup: Setup, samples: int, channels: int, side: int, residual: bool, relu: bool = True) -> Problem:
    samples, channels, side = setup.size(samples, 2), setup.size(channels, 8), setup.size(side, 5)
    shape = (samples, channels, side, side)
    x, r = (
        setup.activation(*shape, wanted=False).to(memory_format=torch.channels_last).requires_grad_() for _ in range(2)
    )
    weight, bias = setup.parameter(channels), setup.parameter(channels)
    mean, var = torch.zeros(channels, device=setup.device), torch.ones(channels, device=setup.device)

    def ours(x: Tensor, w: Tensor, b: Tensor, mean: Tensor, var: Tensor, r: Tensor | None = None) -> Tensor:
        return batch_norm.batch_norm(x, mean, var, w, b, training=True, residual=r, relu=relu)

    def eager(x: Tensor, w: Tensor, b: Tensor, mean: Tensor, var: Tensor, r: Tensor | None = None) -> Tensor:
        y = F.batch_norm(x, mean, var, w, b, training=True)
        y = y if r is None else y + r
        return F.relu(y) if relu else y

    each = kernel_bytes.batch_norm(setup.low, training=True, residual=residual, relu=relu)
    moved = (each[0] * x.numel(), each[1] * x.numel())
    inputs = (x, weight, bias, mean, var, *((r,) if residual else ()))
    name = "batch_norm" + ", add" * residual + ", relu" * relu
    return Problem(name, _text(*shape), ours, eager, inputs, moved)


def _max_pool(setup: Setup, samples: int, channels: int, side: int, size: int) -> Problem:
    """Of 2 by 2 pixels, or ResNet's of 3 by 3."""
    samples, channels, side = setup.size(samples, 2), setup.size(channels, 8), setup.size(side, 5)
    x = setup.activation(samples, channels, side, side, wanted=False).to(memory_format=torch.channels_last)
    edge = size // 2 if size > 2 else 0
    window = ((size, size), (2, 2), (edge, edge))
    return Problem(
        f"max_pool2d, {size} x {size}", _text(*x.shape), lambda x: max_pool.max_pool2d(x, *window),
        lambda x: F.max_pool2d(x, *window), (x.requires_grad_(),), kernel_bytes.max_pool2d(x, *window),
    )  # fmt: skip


# -- attention --------------------------------------------------------------------------------------------------------


def _rope(setup: Setup, batch: int, heads: tuple[int, int], length: int, columns: int) -> Problem:
    batch, length, columns = setup.size(batch, 2), setup.size(length, 7), setup.size(columns, 16)
    heads = (2, 1) if setup.tiny else heads
    q, k = (
        setup.activation(batch, length, n, columns, wanted=False).transpose(1, 2).requires_grad_() for n in heads
    )  # fmt: skip
    angles = torch.outer(torch.arange(length), 10000.0 ** (-torch.arange(0, columns, 2) / columns)).repeat(1, 2)
    cos, sin = (f(angles).to(setup.device, setup.low) for f in (torch.cos, torch.sin))

    def turned(x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        return torch.cat((-second, first), dim=-1)

    def eager(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return q * cos + turned(q) * sin, k * cos + turned(k) * sin

    moved = kernel_bytes.rope(q, k, cos=cos, sin=sin)
    return Problem(
        "rope of q and k", f"{_text(batch, sum(heads), length, columns)}", rope.rope_qk, eager, (q, k, cos, sin),
        (moved, moved),
    )  # fmt: skip


def _one(make: Callable[..., Problem], *arguments: Any) -> Callable[[Setup], Iterator[Problem]]:
    def problems(setup: Setup) -> Iterator[Problem]:
        yield make(setup, *arguments)

    return functools.wraps(make)(problems)


#: Batch norms of ResNet-50 at batch 256: channels, side, residual, relu.
_RESNET: Final = (
    (64, 112, False, True), (64, 56, False, True), (256, 56, False, False), (128, 28, False, True),
    (512, 28, True, True), (256, 14, False, True), (1024, 14, True, True), (512, 7, False, True), (2048, 7, True, True),
)  # fmt: skip

#: The most important first: what a time limit leaves out comes last.
PROBLEMS: Final = (
    Source("cross_entropy", _one(_cross_entropy, 16384, 50257), quick=True),
    Source("batch_norm, add, relu", _one(_batch_norm, 256, 256, 56, True), quick=True),
    Source("max_pool2d", _one(_max_pool, 32, 64, 256, 2), quick=True),
    Source("rope", _one(_rope, 4, (32, 8), 2048, 64), quick=True),
    Source("cross_entropy, gradient in forward", _one(_cross_entropy, 16384, 50257, True)),
    Source("linear_cross_entropy", _one(_linear_cross_entropy, 16384, 768, 50257)),
    *(Source("batch_norm", _one(_batch_norm, 256, *each)) for each in _RESNET),
    Source("max_pool2d", _one(_max_pool, 256, 64, 112, 3)),
    Source("group_norm, silu", _one(_group_norm, 16, 320, 64)),
    Source("group_norm, silu", _one(_group_norm, 16, 1280, 16)),
    Source("cross_entropy, 128256 classes", _one(_cross_entropy, 8192, 128256)),
)
