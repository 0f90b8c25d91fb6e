"""What ``benchmarks.kernels`` times: a hand-written kernel at one shape, beside what eager mode runs in its place.

The eager form is written as a model would have it, and ends in the cast that the next matmul would make, where autocast
leaves FP32: both then give the same dtypes. Inputs are random, activations low and parameters FP32.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.workloads import kernel_bytes
from fxprec.kernels.nn import (
    batch_norm,
    cross_entropy,
    glu,
    group_norm,
    layer_norm,
    linear_cross_entropy,
    rms_norm,
    rope,
    softmax,
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
        options: keyword arguments of both functions, and ``checked``, those of the comparison of the two: a dropout of
            0, since each draws its own.
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
    options: Mapping[str, Any] = field(default_factory=dict)
    checked: Mapping[str, Any] = field(default_factory=dict)
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


def _dropped(p: float) -> dict[str, Any]:
    return {"options": {"p": p}, "checked": {"p": 0.0}}


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


def _layer_norm(setup: Setup, rows: int, columns: int, residual: bool, p: float = 0.0) -> Problem:
    rows, columns = setup.size(rows, 6), setup.size(columns, 32)
    x, r = setup.activation(rows, columns), setup.activation(rows, columns)
    weight, bias = setup.parameter(columns), setup.parameter(columns)
    moved = kernel_bytes.norm(
        rows, columns, setup.low, center=True, residual=setup.low if residual else None,
        parameters=(weight.dtype, bias.dtype), dropout=p > 0,
    )  # fmt: skip
    if not residual:
        return Problem(
            "layer_norm", _text(rows, columns), lambda x, w, b: layer_norm.layer_norm(x, columns, w, b),
            lambda x, w, b: F.layer_norm(x, (columns,), w, b).to(x.dtype), (x, weight, bias), moved,
        )  # fmt: skip

    def eager(x: Tensor, r: Tensor, w: Tensor, b: Tensor, p: float) -> tuple[Tensor, Tensor]:
        s = r + F.dropout(x, p)
        return F.layer_norm(s, (columns,), w, b).to(x.dtype), s

    return Problem(
        "dropout, add, layer_norm" if p else "add, layer_norm", _text(rows, columns),
        lambda x, r, w, b, p: layer_norm.layer_norm(x, columns, w, b, residual=r, dropout_p=p), eager,
        (x, r, weight, bias), moved, **_dropped(p),
    )  # fmt: skip


def _rms_norm(setup: Setup, rows: int, columns: int, residual: bool) -> Problem:
    rows, columns = setup.size(rows, 6), setup.size(columns, 32)
    x, r, weight = setup.activation(rows, columns), setup.activation(rows, columns), setup.parameter(columns)
    moved = kernel_bytes.norm(
        rows, columns, setup.low, center=False, residual=setup.low if residual else None, parameters=(weight.dtype,)
    )

    def plain(x: Tensor, w: Tensor) -> Tensor:
        """As Llama has it, whose weight is cast by hand."""
        wide = x.float()
        return w.to(x.dtype) * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype)

    def added(x: Tensor, r: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        s = r + x
        return plain(s, w), s

    if not residual:
        return Problem(
            "rms_norm", _text(rows, columns), lambda x, w: rms_norm.rms_norm(x, columns, w, 1e-6), plain, (x, weight),
            moved,
        )  # fmt: skip
    return Problem(
        "add, rms_norm", _text(rows, columns), lambda x, r, w: rms_norm.rms_norm(x, columns, w, 1e-6, residual=r),
        added, (x, r, weight), moved,
    )  # fmt: skip


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


# -- attention and gates ----------------------------------------------------------------------------------------------


def _softmax(setup: Setup, batch: int, heads: int, length: int, causal: bool, p: float = 0.0) -> Problem:
    batch, heads, length = setup.size(batch, 2), setup.size(heads, 2), setup.size(length, 9)
    x = setup.activation(batch, heads, length, length)
    scale = 0.125
    mask = None
    if not causal:
        mask = torch.zeros(batch, 1, 1, length, device=setup.device, dtype=setup.low)
        mask[:, :, :, length - length // 8 :] = -1e4
    above = torch.ones(length, length, dtype=torch.bool, device=setup.device).triu(1)

    def ours(x: Tensor, mask: Tensor | None = None, *, p: float) -> Tensor:
        return softmax.softmax(x, scale=scale, mask=mask, causal=causal, dropout_p=p)

    def eager(x: Tensor, mask: Tensor | None = None, *, p: float) -> Tensor:
        z = x * scale
        z = z.masked_fill(above, -torch.inf) if mask is None else z + mask
        return F.dropout(torch.softmax(z, dim=-1), p).to(x.dtype)

    moved = kernel_bytes.softmax(x, mask=mask, causal=causal, dropout_p=p)
    name = ("causal" if causal else "mask") + ", softmax" + ", dropout" * (p > 0)
    return Problem(
        name, _text(*x.shape), ours, eager, (x,) if mask is None else (x, mask), moved, **_dropped(p)
    )  # fmt: skip


def _swiglu(setup: Setup, rows: int, columns: int, packed: bool) -> Problem:
    rows, columns = setup.size(rows, 6), setup.size(columns, 24)
    if not packed:
        gate, up = setup.activation(rows, columns), setup.activation(rows, columns)
        return Problem(
            "swiglu", _text(rows, columns), glu.swiglu, lambda g, u: F.silu(g) * u, (gate, up),
            kernel_bytes.glu(gate, up),
        )  # fmt: skip

    def eager(x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate) * up

    x = setup.activation(rows, 2 * columns)
    return Problem(
        "swiglu, packed", _text(rows, 2 * columns), glu.swiglu_packed, eager, (x,), kernel_bytes.glu(*x.chunk(2, -1))
    )


def _geglu(setup: Setup, rows: int, columns: int) -> Problem:
    rows, columns = setup.size(rows, 6), setup.size(columns, 24)
    gate, up = setup.activation(rows, columns), setup.activation(rows, columns)
    return Problem(
        "geglu", _text(rows, columns), glu.geglu, lambda g, u: F.gelu(g) * u, (gate, up), kernel_bytes.glu(gate, up)
    )


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
    Source("dropout, add, layer_norm", _one(_layer_norm, 16384, 768, True, 0.1), quick=True),
    Source("batch_norm, add, relu", _one(_batch_norm, 256, 256, 56, True), quick=True),
    Source("swiglu", _one(_swiglu, 8192, 5632, False), quick=True),
    Source("cross_entropy, gradient in forward", _one(_cross_entropy, 16384, 50257, True)),
    Source("linear_cross_entropy", _one(_linear_cross_entropy, 16384, 768, 50257)),
    *(Source("batch_norm", _one(_batch_norm, 256, *each)) for each in _RESNET),
    Source("layer_norm", _one(_layer_norm, 50432, 768, False)),
    Source("add, layer_norm", _one(_layer_norm, 16384, 768, True)),
    Source("rms_norm", _one(_rms_norm, 8192, 2048, False)),
    Source("add, rms_norm", _one(_rms_norm, 8192, 2048, True)),
    Source("rope", _one(_rope, 4, (32, 8), 2048, 64)),
    Source("group_norm, silu", _one(_group_norm, 16, 320, 64)),
    Source("group_norm, silu", _one(_group_norm, 16, 1280, 16)),
    Source("causal, softmax, dropout", _one(_softmax, 16, 12, 1024, True, 0.1)),
    Source("mask, softmax", _one(_softmax, 32, 12, 512, False)),
    Source("swiglu, packed", _one(_swiglu, 8192, 5632, True)),
    Source("geglu", _one(_geglu, 16384, 3072)),
    Source("cross_entropy, 128256 classes", _one(_cross_entropy, 8192, 128256)),
)
