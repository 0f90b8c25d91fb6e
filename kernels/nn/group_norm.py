"""Computes group norm, with SiLU in the same pass, of contiguous and channels_last tensors.

    z = (x - mean) * rstd * weight + bias              mean and variance of C/groups channels times all pixels
    y = z * sigmoid(z)                                 or y = z

    n = (x - mean) * rstd      dz = dy * silu'(z)      g = dz * weight
    dx = rstd * (g - mean(g) - n * mean(g * n))        dweight = sum of dz * n      dbias = sum of dz

Diffusion models run this before every convolution: eager mode casts to FP32, normalises, casts back, and reads and
writes again for SiLU; in channels_last its group norm first copies to contiguous. Here x is read and y written once
where a group fits in registers (``FORWARD_ELEMENTS``), else x is read twice, the second time mostly from a cache. z is
not saved: the backward reads dy and x, once or twice likewise, and computes it again. Of channels_last tensors that are
read twice programs take no groups but channels side by side, unless groups are small (group_norm_slabs.py).
"""

from __future__ import annotations

from math import gcd, prod
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from fxprec.kernels.launch.kernel_op import KernelOp
from fxprec.kernels.launch.operands import check_operands, memory_format_of, packed
from fxprec.kernels.launch.triton_support import can_launch, multiprocessors, on_device
from fxprec.kernels.nn import group_norm_slabs
from fxprec.kernels.nn.column_sums import add_parts
from fxprec.kernels.nn.group_norm_kernels import group_backward_kernel, group_forward_kernel
from fxprec.kernels.nn.group_norm_slabs import Slabs

#: Largest group that is one tile, in elements, with channels and pixels rounded up to powers of two.
FORWARD_ELEMENTS: Final = 16384
BACKWARD_ELEMENTS: Final = 8192
_TILE: Final = 4096
#: Bytes of a tile of a slab.
_SLAB_BYTES: Final = 8192
#: Bytes of a group that its program reads a second time from the multiprocessor's own cache.
_NEAR_BYTES: Final = 32768
#: Divisor of the number of channels for which Triton reads several at once.
_VECTOR: Final = 16
#: Programs that a grid may have in its first dimension: one for each group of each sample.
_MOST_GROUPS: Final = 2**31 - 1


def group_norm(
    x: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    silu: bool = False,
) -> Tensor:
    """Return ``F.group_norm(x)``, or ``F.silu`` of it, computed in FP32 and rounded once.

    On a CPU, and where Triton is missing, it runs as plain torch.

    Args:
        x: float32, float16 or bfloat16 [N, C, *], contiguous or channels_last (also of 3-D); else it is copied.
        num_groups: what the channels are divided into.
        weight: float32, float16 or bfloat16 [C], or None; likewise the bias.
        eps: added to the variance.

    Returns:
        of x's shape, dtype and memory format.

    Raises:
        TypeError: another dtype (float64 is declined).
        ValueError: channels that are no multiple of num_groups; shapes or devices that do not fit; on a GPU 2**31
            groups of all samples, or more.
    """
    if x.dim() < 2:
        raise ValueError(f"group_norm takes x of shape [N, C, *], got {tuple(x.shape)}.")
    if num_groups < 1 or x.shape[1] % num_groups:
        raise ValueError(f"group_norm divides channels into equal groups, got {x.shape[1]} channels, {num_groups=}.")
    check_operands("group_norm", x=x, weight=weight, bias=bias)
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None and tensor.shape != x.shape[1:2]:
            raise ValueError(f"group_norm takes {name} of shape ({x.shape[1]},), got {tuple(tensor.shape)}.")
    return _group_norm(x, weight, bias, num_groups, eps, silu)[0]


def reference(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, num_groups: int, eps: float = 1e-5, silu: bool = False
) -> Tensor:
    """Compute group norm and SiLU in plain torch, differentiably."""
    # torch's own for channels_last is less exact on a CPU, hence contiguous.
    z = F.group_norm(x.float().contiguous(), num_groups, _float(weight), _float(bias), eps)
    return (F.silu(z) if silu else z).to(x.dtype)


def _launch(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, num_groups: int, eps: float, silu: bool
) -> tuple[Tensor, Tensor]:
    memory_format = memory_format_of(x)
    x = x.contiguous(memory_format=memory_format)
    samples, pixels = x.shape[0], prod(x.shape[2:])
    launches = can_launch(x.device)
    if launches and samples * num_groups > _MOST_GROUPS:
        raise ValueError(
            f"group_norm takes at most {_MOST_GROUPS} groups of all samples, as many as a GPU launches programs, got "
            f"{samples} samples of {num_groups}: give it fewer samples at a time."
        )
    y = torch.empty_like(x)
    statistics = torch.empty((2, samples * num_groups), dtype=torch.float32, device=x.device)
    if not x.numel():
        return y, statistics.zero_()
    if not launches:
        var, mean = torch.var_mean(x.float().contiguous().view(samples * num_groups, -1), 1, correction=0)
        torch.stack((mean, torch.rsqrt(var + eps)), out=statistics)
        return y.copy_(reference(x, weight, bias, num_groups, eps, silu)), statistics
    weight, bias = packed(weight), packed(bias)
    # With channels last a large group lies in short runs far apart: programs take adjacent channels of all groups then.
    if (slabs := _slabs(x, num_groups, memory_format, FORWARD_ELEMENTS)) is not None:
        group_norm_slabs.forward(x, weight, bias, y, statistics, slabs, eps, silu)
        return y, statistics
    # Few large groups are shared among programs, which write partial sums first (phase 1) and results then (phase 2).
    shares, parts, constants = _cut(x, num_groups, memory_format, FORWARD_ELEMENTS, 3)
    with on_device(x.device):
        for phase in (1, 2) if shares > 1 else (0,):
            group_forward_kernel[(samples * num_groups, shares)](
                x, weight, bias, y, statistics, parts, num_groups, pixels, eps, SILU=silu, PHASE=phase, **constants
            )  # fmt: skip
    return y, statistics


def _launch_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    statistics: Tensor,
    num_groups: int,
    silu: bool,
    wanted: list[bool],
) -> list[Tensor]:
    memory_format = memory_format_of(x)
    dy, x = (t.contiguous(memory_format=memory_format) for t in (dy, x))
    samples, channels, pixels = x.shape[0], x.shape[1], prod(x.shape[2:])
    empty = _empty_gradients(x, weight, bias, wanted)
    found = [gradient for gradient in empty if gradient is not None]
    if not x.numel():
        return [gradient.zero_() for gradient in found]
    if not can_launch(x.device):
        # By torch's kernel, which is less exact of channels_last, as is that of the forward.
        wide, gradient, scale = x.float().contiguous(), dy.float().contiguous(), _float(weight)
        mean, rstd = statistics.view(2, samples, num_groups)
        if silu:
            per_channel = (1, -1) + (1,) * (x.dim() - 2)
            z = ((wide.view(samples, num_groups, -1) - mean[..., None]) * rstd[..., None]).view(x.shape)
            z = z if scale is None else z * scale.view(per_channel)
            z = z if bias is None else z + bias.float().view(per_channel)
            gradient = torch.ops.aten.silu_backward(gradient, z)
        sizes, mask = (samples, channels, pixels, num_groups), [each is not None for each in empty]
        made = torch.ops.aten.native_group_norm_backward(gradient, wide, mean, rstd, scale, *sizes, mask)
        return [out.copy_(value) for out, value in zip(empty, made, strict=True) if out is not None]
    dx, dweight, dbias = empty
    weight, bias = packed(weight), packed(bias)
    if (slabs := _slabs(x, num_groups, memory_format, BACKWARD_ELEMENTS)) is not None:
        group_norm_slabs.backward(dy, x, weight, bias, statistics, dx, dweight, dbias, slabs, silu)
        return found
    shares, parts, constants = _cut(x, num_groups, memory_format, BACKWARD_ELEMENTS, 2)
    # Programs write sums over their pixels; a second kernel adds them over samples in a fixed order.
    sums = [gradient for gradient in (dweight, dbias) if gradient is not None]
    columns = torch.empty((len(sums), samples * shares, channels), dtype=torch.float32, device=x.device)
    dweights = None if dweight is None else columns[0]
    dbiases = None if dbias is None else columns[-1]
    with on_device(x.device):
        for phase in (1, 2) if shares > 1 else (0,):
            group_backward_kernel[(samples * num_groups, shares)](
                dy, x, weight, bias, statistics, dx, dweights, dbiases, parts, num_groups, pixels,
                SILU=silu, PHASE=phase, **constants,
            )  # fmt: skip
        if sums:
            add_parts(columns, sums)
    return found


def _fake(x: Tensor, weight: Any, bias: Any, num_groups: int, *_: Any) -> tuple[Tensor, Tensor]:
    y = torch.empty_like(x, memory_format=memory_format_of(x))
    return y, x.new_empty((2, x.shape[0] * num_groups), dtype=torch.float32)


def _fake_backward(dy: Any, x: Tensor, weight: Any, bias: Any, statistics: Any, *rest: Any) -> list[Tensor]:
    return [gradient for gradient in _empty_gradients(x, weight, bias, rest[-1]) if gradient is not None]


def _backward(ctx: Any, dy: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    num_groups, _, silu = ctx.settings
    wanted = [bool(want) for want in ctx.needs_input_grad[:3]]
    found = iter(_group_norm_backward(dy, *ctx.saved_tensors, num_groups, silu, wanted) if any(wanted) else ())
    return tuple(next(found) if want else None for want in wanted)


def _empty_gradients(x: Tensor, weight: Tensor | None, bias: Tensor | None, wanted: list[bool]) -> list[Tensor | None]:
    dx = torch.empty_like(x, memory_format=memory_format_of(x)) if wanted[0] else None
    pairs = zip((weight, bias), wanted[1:], strict=True)
    return [dx, *(t.new_empty(t.shape) if want and t is not None else None for t, want in pairs)]


def _cut(
    x: Tensor, num_groups: int, memory_format: torch.memory_format, elements: int, numbers: int
) -> tuple[int, Tensor | None, dict[str, Any]]:
    """Return the programs a group, memory for their partial sums if there are several, and a launch's constants."""
    groups, channels, pixels = x.shape[0] * num_groups, x.shape[1] // num_groups, prod(x.shape[2:])
    last = memory_format != torch.contiguous_format
    whole, ct, pt, warps = _tile(channels, pixels, last, elements)
    shares = 1 if whole else _shares(groups, pixels, pt, x.device)
    parts = x.new_empty((groups, shares, numbers), dtype=torch.float32) if shares > 1 else None
    return shares, parts, {
        "CPG": channels, "LAST": last, "WHOLE": whole, "PARTS": 1 << (shares - 1).bit_length(), "CT": ct, "PT": pt,
        "num_warps": warps,
    }  # fmt: skip


def _tile(channels: int, pixels: int, last: bool, elements: int) -> tuple[bool, int, int, int]:
    """Return whether a group is one tile, a tile's channels and pixels (powers of two), and its warps."""
    ct, pt = (1 << (n - 1).bit_length() for n in (channels, pixels))
    whole = ct * pt <= elements
    if not whole:
        # As long as possible along memory, up to a whole tile; the other axis gets the rest.
        inner = min(ct if last else pt, _TILE)
        outer = min(pt if last else ct, _TILE // inner)
        ct, pt = (inner, outer) if last else (outer, inner)
    elements = ct * pt
    return whole, ct, pt, max(1, min(elements // 256, 8), min(elements // 512, 16))


def _slabs(x: Tensor, num_groups: int, memory_format: torch.memory_format, elements: int) -> Slabs | None:
    """Cut x into slabs, or return None if programs take groups.

    They do if x is contiguous, if a group is one tile of at most ``elements``, or if its rows are whole 16-byte runs
    and the second read of it hits the multiprocessor's cache.
    """
    samples, channels, pixels = x.shape[0], x.shape[1], prod(x.shape[2:])
    row = channels // num_groups * x.itemsize
    near = row % 16 == 0 and row * pixels <= _NEAR_BYTES
    if memory_format == torch.contiguous_format or near or _tile(channels // num_groups, pixels, True, elements)[0]:
        return None
    widest = 64 if channels % 64 == 0 or channels > 512 else 32
    ct = min(widest, 1 << (channels - 1).bit_length())
    pt = min(max(1, _SLAB_BYTES // x.itemsize // ct), 1 << (pixels - 1).bit_length())
    vector = gcd(channels, _VECTOR)
    shares = _shares(samples * -(-channels // ct), pixels, pt, x.device)
    return Slabs(samples, channels, pixels, num_groups, 1 if vector == _VECTOR else vector, ct, pt, shares)


def _shares(groups: int, pixels: int, pt: int, device: torch.device) -> int:
    """Return the programs a group or slab: enough to fill the device, with four tiles each or more; at most 64."""
    processors = multiprocessors(device) if device.type == "cuda" else 2
    return max(1, min(-(-4 * processors // groups), pixels // (4 * pt), 64))


def _float(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.float()


_group_norm_backward = KernelOp("group_norm_backward", _launch_backward, _fake_backward)
_group_norm = KernelOp("group_norm", _launch, _fake, backward=_backward, reference=reference)
