"""Gated linear units, ``act(gate) * up`` with silu or gelu, in one kernel forward and one backward.

    silu(g) = g * s(g)                    silu'(g) = s + g * s * (1 - s)        s(g) = 1 / (1 + exp(-g))
    gelu(g) = g * c(g)                    gelu'(g) = c + g * phi(g)             c(g) = (1 + erf(g / sqrt(2))) / 2
    gelu(g) ~ g * s(2u)   ("tanh")        ~ s(2u) + g * s * (1 - s) * 2u'       u = sqrt(2 / pi) * (g + 0.044715 g^3)

with phi the normal density; ``(1 + tanh(u)) / 2`` is ``s(2u)``, which loses no digits where tanh is near -1. All in
FP32, rounded once. gate and up are saved, which the matmuls before them made, and nothing else: the backward computes
the activation again. The packed forms read gate and up as the halves of one tensor's last dimension, by strides, and
write one gradient: no split, no cat.

Bytes an element of a low result: 6 forward, 10 backward (eager, of two ops: 10 and 18, and a cat of 8).
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional

from fxprec.kernels.launch.kernel_op import KernelOp, eager_gradients
from fxprec.kernels.launch.operands import check_operands
from fxprec.kernels.launch.triton_support import can_launch, constexpr, jit, on_device, tl

#: What kernels know an activation by.
_KINDS: Final = {"silu": 0, "gelu": 1, "gelu_tanh": 2}
#: Elements of a program, 16 a thread.
_TILE: Final = 2048
_WARPS: Final = 4


@jit()
def slope_and_value(g, KIND: constexpr):
    """The activation's derivative and value. g: fp32, any shape; KIND: 0 silu, 1 gelu, 2 gelu by tanh. Two fp32."""
    # sqrt(1 / 2), 1 / sqrt(2 pi), 2 sqrt(2 / pi), 0.044715 times that, and three times that.
    if KIND == 1:
        share = 0.5 * (1.0 + tl.erf(g * 0.7071067811865476))
        slope = share + g * (tl.exp(-0.5 * g * g) * 0.3989422804014327)
    else:
        inner = g
        factor = 1.0
        if KIND == 2:
            square = g * g
            inner = g * (1.5957691216057308 + 0.07135481627260025 * square)
            factor = 1.5957691216057308 + 0.21406444881780073 * square
        power = tl.exp(-tl.abs(inner))  # at most 1, so that 1 - share is exact in both tails: power * larger
        larger = 1.0 / (1.0 + power)
        share = tl.where(inner >= 0.0, larger, power * larger)
        slope = share + g * (power * larger * larger) * factor
    return slope, g * share


@jit(do_not_specialize=["rows", "blocks"])
def glu_kernel(
    gate, up, out, rows, columns, blocks, gate_row, up_row,
    KIND: constexpr, ROWS: constexpr, BLOCK: constexpr,
):  # fmt: skip
    """``out = act(gate) * up`` of ROWS x BLOCK elements. Grid: ceil(rows / ROWS) * blocks, blocks a row of tiles.

    gate, up: fp32, fp16 or bf16 [rows, columns] with strides gate_row and up_row. out: fp32, fp16 or bf16
    [rows, columns], contiguous, written. Arithmetic in fp32.
    """
    tile = tl.program_id(0)
    row = ((tile // blocks) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    start = (tile % blocks).to(tl.int64) * BLOCK
    lanes = tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (lanes < columns - start)
    g = tl.load(gate + row * gate_row + start + lanes, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + row * up_row + start + lanes, mask=inside, other=0.0).to(tl.float32)
    _, value = slope_and_value(g, KIND)
    tl.store(out + row * columns + start + lanes, value * u, mask=inside)


@jit(do_not_specialize=["rows", "blocks"])
def backward_kernel(
    dy, gate, up, dgate, dup, rows, columns, blocks, dy_row, gate_row, up_row, out_row,
    KIND: constexpr, ROWS: constexpr, BLOCK: constexpr,
):  # fmt: skip
    """``dgate = dy * up * act'(gate)`` and ``dup = dy * act(gate)``. Grid: as of ``glu_kernel``.

    dy, gate, up: fp32, fp16 or bf16 [rows, columns] with strides dy_row, gate_row and up_row. dgate, dup: of gate's and
    up's dtype, [rows, columns] with stride out_row, written. Arithmetic in fp32.
    """
    tile = tl.program_id(0)
    row = ((tile // blocks) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    start = (tile % blocks).to(tl.int64) * BLOCK
    lanes = tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (lanes < columns - start)
    d = tl.load(dy + row * dy_row + start + lanes, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(gate + row * gate_row + start + lanes, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + row * up_row + start + lanes, mask=inside, other=0.0).to(tl.float32)
    slope, value = slope_and_value(g, KIND)
    tl.store(dgate + row * out_row + start + lanes, d * u * slope, mask=inside)
    tl.store(dup + row * out_row + start + lanes, d * value, mask=inside)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """``silu(gate) * up`` (Shazeer, "GLU variants improve Transformer", 2020), in FP32 and rounded once.

    On a CPU it runs as plain torch. Double backward is plain torch too.

    Args:
        gate: float32, float16 or bfloat16, any shape. Rows of any stride; elements of a row that are not next to
            each other are copied first.
        up: as gate, of the same shape; another dtype is promoted as torch does.

    Returns:
        contiguous, gate's shape. Gradients come in the dtypes of gate and up.

    Raises:
        TypeError: another dtype.
        ValueError: shapes or devices that differ.
    """
    return _glu("swiglu", gate, up, "silu")


def geglu(gate: Tensor, up: Tensor, approximate: str = "none") -> Tensor:
    """``gelu(gate, approximate) * up``; all else as ``swiglu``.

    Args:
        approximate: "none", with erf, or "tanh", as of ``torch.nn.functional.gelu``.

    Raises:
        ValueError: another approximate.
    """
    return _glu("geglu", gate, up, _gelu(approximate))


def swiglu_packed(x: Tensor) -> Tensor:
    """``silu(gate) * up`` where x's last dimension holds gate, then up; all else as ``swiglu``.

    Args:
        x: float32, float16 or bfloat16 [..., 2 * columns], the result of one matmul.

    Returns:
        contiguous [..., columns]. The gradient is one contiguous tensor of x's shape.

    Raises:
        ValueError: a last dimension that is odd or missing.
    """
    return _packed("swiglu_packed", x, "silu")


def geglu_packed(x: Tensor, approximate: str = "none") -> Tensor:
    """``gelu(gate, approximate) * up`` where x's last dimension holds gate, then up; all else as ``swiglu_packed``."""
    return _packed("geglu_packed", x, _gelu(approximate))


def reference(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """The same in plain torch, on any device, differentiable. activation: "silu", "gelu" or "gelu_tanh"."""
    g = gate.float()
    if activation == "silu":
        value = functional.silu(g)
    else:
        value = functional.gelu(g, approximate="tanh" if activation == "gelu_tanh" else "none")
    return (value * up.float()).to(torch.promote_types(gate.dtype, up.dtype))


def reference_packed(x: Tensor, activation: str) -> Tensor:
    """``reference`` of the two halves of x's last dimension."""
    return reference(*_halves(x), activation)


def _glu(name: str, gate: Tensor, up: Tensor, activation: str) -> Tensor:
    check_operands(name, gate=gate, up=up)
    if gate.shape != up.shape:
        raise ValueError(f"{name} takes gate and up of one shape, got {tuple(gate.shape)} and {tuple(up.shape)}.")
    return _GLU(gate, up, activation)


def _packed(name: str, x: Tensor, activation: str) -> Tensor:
    check_operands(name, x=x)
    if x.dim() < 1 or x.shape[-1] % 2:
        raise ValueError(f"{name} takes x whose last dimension holds gate and up of one size, got {tuple(x.shape)}.")
    return _GLU_PACKED(x, activation)


def _gelu(approximate: str) -> str:
    if approximate not in ("none", "tanh"):
        raise ValueError(f'geglu takes approximate "none" or "tanh", got {approximate!r}.')
    return "gelu_tanh" if approximate == "tanh" else "gelu"


def _halves(x: Tensor) -> tuple[Tensor, Tensor]:
    columns = x.shape[-1] // 2
    return x.narrow(-1, 0, columns), x.narrow(-1, columns, columns)


def _matrices(*tensors: Tensor) -> list[Tensor]:
    """Each as [rows, columns], columns next to each other: one row where all are contiguous, else copies if need be."""
    if all(t.is_contiguous() for t in tensors):
        return [t.view(1, -1) for t in tensors]
    flat = [t.reshape(-1, t.shape[-1]) for t in tensors]
    return [t if t.stride(1) == 1 else t.contiguous() for t in flat]


def _shape(rows: int, columns: int) -> tuple[tuple[int], int, dict[str, int]]:
    """Grid, tiles a row, and block shape."""
    block = min(_TILE, 1 << (columns - 1).bit_length())
    count, blocks = _TILE // block, (columns + block - 1) // block
    return ((rows + count - 1) // count * blocks,), blocks, {"ROWS": count, "BLOCK": block, "num_warps": _WARPS}


@torch.no_grad()
def _write_gradients(dy: Tensor, gate: Tensor, up: Tensor, dgate: Tensor, dup: Tensor, activation: str) -> None:
    """The backward kernel, or the same in plain torch, into dgate and dup."""
    if not can_launch(gate.device) or gate.numel() == 0:
        d, g, u = dy.float(), gate.float(), up.float()
        if activation == "silu":
            dgate.copy_(torch.ops.aten.silu_backward(d * u, g))
        else:
            approximate = "tanh" if activation == "gelu_tanh" else "none"
            dgate.copy_(torch.ops.aten.gelu_backward(d * u, g, approximate=approximate))
        dup.copy_(d * reference(g, torch.ones_like(g), activation))
        return
    dy, gate, up, dgate, dup = _matrices(dy, gate, up, dgate, dup)
    rows, columns = gate.shape
    grid, blocks, shape = _shape(rows, columns)
    with on_device(gate.device):
        backward_kernel[grid](
            dy, gate, up, dgate, dup, rows, columns, blocks, dy.stride(0), gate.stride(0), up.stride(0),
            dgate.stride(0), KIND=_KINDS[activation], enable_fp_fusion=False, **shape,
        )  # fmt: skip


def _forward(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    if not can_launch(gate.device) or gate.numel() == 0:
        with torch.no_grad():
            return reference(gate, up, activation).contiguous()
    out = _fake(gate, up, activation)
    gate, up, flat = _matrices(gate, up, out)
    rows, columns = gate.shape
    grid, blocks, shape = _shape(rows, columns)
    with on_device(gate.device):
        glu_kernel[grid](
            gate, up, flat, rows, columns, blocks, gate.stride(0), up.stride(0),
            KIND=_KINDS[activation], enable_fp_fusion=False, **shape,
        )  # fmt: skip
    return out


def _fake(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    return torch.empty(gate.shape, dtype=torch.promote_types(gate.dtype, up.dtype), device=gate.device)


def _backward_forward(dy: Tensor, gate: Tensor, up: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    dgate, dup = _backward_fake(dy, gate, up, activation)
    _write_gradients(dy, gate, up, dgate, dup, activation)
    return dgate, dup


def _backward_fake(dy: Tensor, gate: Tensor, up: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    return gate.new_empty(gate.shape), up.new_empty(up.shape)


def _packed_forward(x: Tensor, activation: str) -> Tensor:
    return _forward(*_halves(x), activation)


def _packed_fake(x: Tensor, activation: str) -> Tensor:
    return x.new_empty((*x.shape[:-1], x.shape[-1] // 2))


def _packed_backward_forward(dy: Tensor, x: Tensor, activation: str) -> Tensor:
    dx = x.new_empty(x.shape)
    _write_gradients(dy, *_halves(x), *_halves(dx), activation)
    return dx


def _packed_backward_fake(dy: Tensor, x: Tensor, activation: str) -> Tensor:
    return x.new_empty(x.shape)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.activation = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    gate, up = ctx.saved_tensors
    if torch.is_grad_enabled():
        return eager_gradients(reference, (gate, up, ctx.activation), (dy,))
    return (*_GLU_BACKWARD(dy, gate, up, ctx.activation), None)


def _packed_backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    (x,) = ctx.saved_tensors
    if torch.is_grad_enabled():
        return eager_gradients(reference_packed, (x, ctx.activation), (dy,))
    return _GLU_PACKED_BACKWARD(dy, x, ctx.activation), None


_GLU_BACKWARD = KernelOp("glu_backward", _backward_forward, _backward_fake)
_GLU = KernelOp("glu", _forward, _fake, backward=_backward, setup_context=_setup)
_GLU_PACKED_BACKWARD = KernelOp("glu_packed_backward", _packed_backward_forward, _packed_backward_fake)
_GLU_PACKED = KernelOp("glu_packed", _packed_forward, _packed_fake, backward=_packed_backward, setup_context=_setup)
