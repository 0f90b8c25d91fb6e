"""Runs linears and convolutions on weights that oneDNN packed once, with the activation behind in the same kernel.

oneDNN's kernels read a weight in blocks. Given a plain one it reorders it at each call, which for a few rows takes
longer than the product. A packed weight is an opaque tensor: it has no readable memory, no copy and no gradient, and
its products record nothing for a backward. So callers keep the plain weight, and run torch's own ops under tracers and
where gradients are wanted.

Convolutions on packed weights return channels_last for any input: ``in_format_of`` restores the format that plain ones
would have returned.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fxprec.kernels.launch.operands import memory_format_of
from fxprec.kernels.torch_internals import (
    conv_binary,
    conv_binary_,
    conv_pointwise,
    has_bfloat16_kernels,
    linear_pointwise,
    reorder_conv_weight,
    reorder_linear_weight,
    reorder_transposed_weight,
    transposed_pointwise,
)

_PARTS: Final = (
    reorder_linear_weight, linear_pointwise, reorder_conv_weight, conv_pointwise, conv_binary, conv_binary_,
    reorder_transposed_weight, transposed_pointwise, has_bfloat16_kernels,
)  # fmt: skip
#: Multiply-adds up to which torch multiplies bfloat16 matrices by a loop of its own, which is faster than a call of
#: oneDNN. Source: ATen/native/mkldnn/Matmul.cpp, use_mkldnn_bf16_matmul.
FEW: Final = 16**3
#: Most sizes of input for which a weight is packed: each takes as much memory as the weight.
_SIZES: Final = 4


def can_pack(dtype: torch.dtype) -> bool:
    """Return whether products in this dtype run on packed weights here: bfloat16, if oneDNN has kernels for it."""
    if dtype is not torch.bfloat16 or any(part is None for part in _PARTS):
        return False
    mkldnn: Any = torch.backends.mkldnn
    return mkldnn.is_available() and mkldnn.enabled and has_bfloat16_kernels()


def pack_linear(weight: Tensor) -> Tensor:
    """Return the weight of ``F.linear`` in the layout of oneDNN's kernels. A hint of the batch size gained nothing."""
    return reorder_linear_weight(weight.contiguous(), None)


class Geometry(NamedTuple):
    """Stride, padding and dilation of a convolution, a number for each dimension of the image.

    Attributes:
        groups: of channels.
        output_padding: of a transposed convolution; None for others.
    """

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    output_padding: tuple[int, ...] | None = None


class PackedConv:
    """Convolution whose weight is packed for each size of input.

    Which layout oneDNN's kernel reads depends on the size, and one in another layout is reordered at each call by a
    loop that takes a hundred times as long as the convolution (measured: 1.5 ms against 0.03 ms).

    Args:
        weight: low or FP32, of 2 or 3 dimensions of an image.
        geometry: of the convolution.
    """

    def __init__(self, weight: Tensor, geometry: Geometry) -> None:
        stride, padding, dilation, groups, more = self._geometry = geometry
        self._dimensions = weight.dim()
        self._is_transposed = more is not None
        self._options = (padding, stride, dilation, groups) if more is None else (
            padding, more, stride, dilation, groups)  # fmt: skip
        self._reorder = reorder_conv_weight if more is None else reorder_transposed_weight
        self._pointwise = conv_pointwise if more is None else transposed_pointwise
        self._kernel = weight.shape[2:]
        self._channels = weight.shape[0]
        self._plain: Tensor | None = weight.contiguous()
        self._packed: dict[torch.Size, Tensor] = {}
        self._gives: dict[torch.Size, tuple[int, ...]] = {}

    def __call__(
        self, x: Tensor, bias: Tensor | None, act: str, numbers: Sequence[float], algorithm: str
    ) -> Tensor:  # fmt: skip
        """Convolve a batch of images, or one, and apply the activation ``act``; the result is channels_last."""
        if x.dim() != self._dimensions:
            return self(x.unsqueeze(0), bias, act, numbers, algorithm).squeeze(0)
        return self._pointwise(x, self._for_input(x.shape), bias, *self._options, act, numbers, algorithm)

    def gives(self, shape: torch.Size) -> tuple[int, ...]:
        """Return the shape of the result, or () for an input without a batch. Not for transposed convolutions."""
        known = self._gives.get(shape)
        if known is not None or len(shape) != self._dimensions:
            return known or ()
        stride, padding, dilation, _, _ = self._geometry
        sizes = zip(shape[2:], self._kernel, stride, padding, dilation, strict=True)
        found = shape[0], self._channels, *((n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in sizes)
        # Bounded, as a model may come with ever new sizes.
        if len(self._gives) < _SIZES:
            self._gives[shape] = found
        return found

    def plus(self, x: Tensor, bias: Tensor | None, other: Tensor, relu: bool, over: bool) -> Tensor | None:
        """Return ``relu?(conv(x) + other)`` in one kernel; ``over``: the result may overwrite ``other``.

        None if the weight is not packed for this size, of which there are too many. Not for transposed convolutions.
        """
        weight = self._for_input(x.shape)
        if not weight.is_mkldnn:
            return None
        rest = weight, bias, *self._options, "add", 1.0, "relu" if relu else None, [], None
        if over and _is_channels_last(other):
            return conv_binary_(other, x, *rest)
        return conv_binary(x, other, *rest)

    def _for_input(self, shape: torch.Size) -> Tensor:
        """Return the packed weight for inputs of this shape; beyond a few shapes the plain weight."""
        found = self._packed.get(shape)
        return self._pack(shape) if found is None else found

    def _pack(self, shape: torch.Size) -> Tensor:
        plain = self._plain
        # Unpacked from a packed weight, which loses nothing.
        if plain is None:
            dense = next(iter(self._packed.values())).to_dense()
            plain = self._plain = dense.transpose(0, 1).contiguous() if self._is_transposed else dense
        if len(self._packed) >= _SIZES or 0 in shape:
            return plain
        packed = self._reorder(plain, *self._options, [*shape])
        self._packed[shape] = packed
        if len(self._packed) == 1 and not (self._is_transposed and self._geometry.groups > 1):
            # Mostly there is one size only. Transposed weights of several groups do not unpack as they were.
            self._plain = None
        return packed

    @property
    def nbytes(self) -> int:
        """Bytes of the weights held so far."""
        held = [*self._packed.values(), *([] if self._plain is None else [self._plain])]
        return sum(each.numel() * each.element_size() for each in held)


def fold_norm(
    weight: Tensor, bias: Tensor | None, mean: Tensor, var: Tensor, gamma: Tensor | None, beta: Tensor | None,
    eps: float, geometry: Geometry,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return weight and bias, in FP32, of a convolution with the batch norm behind it folded in."""
    scale = torch.rsqrt(var.double() + eps)
    scale = scale if gamma is None else scale * gamma.double()
    shift = -mean.double() if bias is None else bias.double() - mean.double()
    shift = shift * scale if beta is None else shift * scale + beta.double()
    ones, wide = [1] * (weight.dim() - 2), weight.double()
    if geometry.output_padding is None:
        return (wide * scale.view(-1, 1, *ones)).float(), shift.float()
    # Input channels before output channels, of each group.
    apart = wide.unflatten(0, (geometry.groups, -1))
    return (apart * scale.view(geometry.groups, 1, -1, *ones)).flatten(0, 1).float(), shift.float()


def packed_linear_of_many(x: Tensor, weight: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    """Return ``F.linear`` with a small weight: packed, unless the input has so few rows that torch's loop is faster."""
    if x.numel() * weight.shape[0] <= FEW:
        return F.linear(x, weight, bias)
    return linear_pointwise(x, packed, bias, "none", [], "")


def packed_conv(
    x: Tensor, packed: PackedConv, bias: Tensor | None, act: str = "none", numbers: Sequence[float] = (),
    algorithm: str = "",
) -> Tensor:  # fmt: skip
    """Run a convolution and its activation ``act`` in one kernel; the result is channels_last."""
    return packed(x, bias, act, numbers, algorithm)


def packed_conv_plus(
    x: Tensor, packed: PackedConv, bias: Tensor | None, other: Tensor, relu: bool = False, over: bool = False
) -> Tensor:  # fmt: skip
    """Return ``relu?(conv(...) + other)``, in one kernel if the two have one shape.

    Args:
        over: ``other`` is not read afterwards, so that the result may take its memory.
    """
    if other.dtype is x.dtype and other.shape == packed.gives(x.shape):
        joined = packed.plus(x, bias, other, relu, over)
        if joined is not None:
            return joined
    y = packed(x, bias, "none", (), "") + other
    return F.relu(y) if relu else y


def in_format_of(y: Tensor, *sources: Tensor) -> Tensor:
    """Return ``y`` in the memory format that plain ops on the sources give: channels_last if one of them is."""
    if y.is_contiguous() or any(map(_is_channels_last, sources)):
        return y
    return y.contiguous()


def _is_channels_last(x: Tensor) -> bool:
    return memory_format_of(x) is not torch.contiguous_format
