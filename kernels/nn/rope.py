"""Applies rotary position embedding (Su et al., "RoFormer", 2021) to queries and keys, both in one launch.

A pair (a, b) of a row at position t and its frequency's cos c and sin s become

    a' = a * c - b * s          b' = b * c + a * s          in FP32, rounded once

Pairs are columns (i, i + R / 2), as in Llama and GPT-NeoX, or (2i, 2i + 1), as in GPT-J, of the first R columns; the
others pass through. The backward is the transposed rotation (c, -s) of the gradient, which is the same op: cos and sin
are all that is saved, and any number of derivatives launches kernels.

A program loads cos and sin of some positions once and goes over heads with them. Bytes an element of a low x: 4,
forward and backward (eager, rotate-half of low cos and sin: 20 forward). On a CPU a compiled loop does the
same, ``cpu/rope.cpp``; the first call compiles (``cpu/cpp``).
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final

import torch
from torch import Tensor

from fxprec.kernels.cpu.cpp import compiled
from fxprec.kernels.launch.direct import Run
from fxprec.kernels.launch.kernel_op import KernelOp
from fxprec.kernels.launch.operands import check_looped, check_operands
from fxprec.kernels.launch.triton_support import Bound, can_launch, constexpr, jit, tl

#: Pairs of a tile, 8 a thread.
_TILE: Final = 1024
_WARPS: Final = 4
#: Fewest programs of a launch, some four for each multiprocessor: with fewer, heads are spread over programs.
_PROGRAMS: Final = 528
_ANY: Final = ["positions", "blocks", "q_heads", "k_heads", "chunk", "q_chunks"]


@jit()
def load_pairs(rows, inside, HALF: constexpr, POSITIONS: constexpr, BLOCK: constexpr):
    """Load interleaved pairs: two fp32 [P, BLOCK]. rows: fp32, fp16 or bf16 pointers [P, 1] to 2 * HALF columns."""
    column = tl.arange(0, 2 * BLOCK)[None, :]
    both = tl.load(rows + column, mask=inside & (column < 2 * HALF), other=0.0).to(tl.float32)
    return tl.split(tl.reshape(both, (POSITIONS, BLOCK, 2)))


@jit()
def rotate_heads(
    x, out, first, last, position, inside, x_h, x_t, out_h, out_t, c1, s1, c2, s2,
    HALF: constexpr, DIM: constexpr, INTERLEAVED: constexpr,
    POSITIONS: constexpr, BLOCK: constexpr, PASS: constexpr,
):  # fmt: skip
    """Rotate heads ``first`` to ``last`` of a batch entry, at positions ``position`` (int64 [P, 1], where ``inside``).

    x, out: fp32, fp16 or bf16 [heads, positions, DIM], columns next to each other, with strides of heads and positions.
    c1, s1, c2, s2: fp32 [P, BLOCK], cos and sin for the first and second of each of the HALF pairs. Arithmetic in fp32.
    """
    pair = tl.arange(0, BLOCK)[None, :]
    source = x + first.to(tl.int64) * x_h + position * x_t
    target = out + first.to(tl.int64) * out_h + position * out_t
    for _ in range(first, last):
        if INTERLEAVED:
            column = tl.arange(0, 2 * BLOCK)[None, :]
            a, b = load_pairs(source, inside, HALF, POSITIONS, BLOCK)
            turned = tl.interleave(a * c1 - b * s1, b * c2 + a * s2)
            tl.store(target + column, turned, mask=inside & (column < 2 * HALF))
        else:
            here = inside & (pair < HALF)
            a = tl.load(source + pair, mask=here, other=0.0).to(tl.float32)
            b = tl.load(source + HALF + pair, mask=here, other=0.0).to(tl.float32)
            tl.store(target + pair, a * c1 - b * s1, mask=here)
            tl.store(target + HALF + pair, b * c2 + a * s2, mask=here)
        if PASS:
            column = 2 * HALF + tl.arange(0, PASS)[None, :]
            rest = tl.load(source + column, mask=inside & (column < DIM))
            tl.store(target + column, rest, mask=inside & (column < DIM))
        source += x_h
        target += out_h


@jit(do_not_specialize=_ANY)
def rope_kernel(
    q, q_out, k, k_out, cos, sin, positions, blocks, q_heads, k_heads, chunk, q_chunks,
    q_b, q_h, q_t, qo_b, qo_h, qo_t, k_b, k_h, k_t, ko_b, ko_h, ko_t, cos_b, cos_t, sin_b, sin_t,
    HALF: constexpr, DIM: constexpr, WIDE: constexpr, INTERLEAVED: constexpr, INVERSE: constexpr,
    POSITIONS: constexpr, BLOCK: constexpr, PASS: constexpr,
):  # fmt: skip
    """Rotate ``chunk`` heads of q or of k at POSITIONS positions. Grid: (batch * blocks, q_chunks + chunks of k).

    q, q_out: fp32, fp16 or bf16 [batch, q_heads, positions, DIM], with three strides each; columns next to each other.
    k, k_out: the same with k_heads, or None. cos, sin: fp32, fp16 or bf16 [batch, positions, HALF or, with WIDE,
    2 * HALF], with two strides each, that of the batch maybe 0. INVERSE: the transposed rotation. Arithmetic in fp32.
    """
    batch = (tl.program_id(0) // blocks).to(tl.int64)
    part = tl.program_id(1)
    position = ((tl.program_id(0) % blocks) * POSITIONS + tl.arange(0, POSITIONS)).to(tl.int64)[:, None]
    inside = position < positions
    pair = tl.arange(0, BLOCK)[None, :]
    here = inside & (pair < HALF)
    cos += batch * cos_b + position * cos_t
    sin += batch * sin_b + position * sin_t
    if WIDE and INTERLEAVED:
        c1, c2 = load_pairs(cos, inside, HALF, POSITIONS, BLOCK)
        s1, s2 = load_pairs(sin, inside, HALF, POSITIONS, BLOCK)
    else:
        c1 = tl.load(cos + pair, mask=here, other=0.0).to(tl.float32)
        s1 = tl.load(sin + pair, mask=here, other=0.0).to(tl.float32)
        c2 = c1
        s2 = s1
        if WIDE:
            c2 = tl.load(cos + HALF + pair, mask=here, other=0.0).to(tl.float32)
            s2 = tl.load(sin + HALF + pair, mask=here, other=0.0).to(tl.float32)
    # Cos and sin may differ between the two columns of a pair, so the transpose exchanges them.
    # The transpose of ((c1, -s1), (s2, c2)).
    if INVERSE:
        first, second = -s2, -s1
    else:
        first, second = s1, s2
    # Queries and keys share a launch: the second grid dimension tells them apart.
    if part < q_chunks:
        rotate_heads(
            q + batch * q_b, q_out + batch * qo_b, part * chunk, tl.minimum(part * chunk + chunk, q_heads),
            position, inside, q_h, q_t, qo_h, qo_t, c1, first, c2, second, HALF, DIM, INTERLEAVED,
            POSITIONS, BLOCK, PASS,
        )  # fmt: skip
    elif k is not None:
        part -= q_chunks
        rotate_heads(
            k + batch * k_b, k_out + batch * ko_b, part * chunk, tl.minimum(part * chunk + chunk, k_heads),
            position, inside, k_h, k_t, ko_h, ko_t, c1, first, c2, second, HALF, DIM, INTERLEAVED,
            POSITIONS, BLOCK, PASS,
        )  # fmt: skip


def rope(
    x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False, rotary_dim: int | None = None,
    compiled: bool = False,
) -> Tensor:  # fmt: skip
    """Rotate the pairs of x by the angles whose cos and sin are given, in FP32 and rounded once.

    On a CPU it runs as plain torch, or compiled.

    Args:
        x: float32, float16 or bfloat16 [B, H, T, D], [B, T, D] or [T, D]. B, H and T may have any strides, e.g.
            those of a transposed [B, T, H, D]. A transposed D, with columns that are not next to each other, runs as
            plain torch.
        cos: float32, float16 or bfloat16, one entry for each pair, or one for each column (Hugging Face repeats the
            pairs' in the order of the columns; they may differ): [T, R / 2], [T, R], or with a leading B or 1.
        sin: of cos's shape.
        interleaved: pairs are neighbours (GPT-J), not columns half of R apart (Llama, GPT-NeoX).
        rotary_dim: R, how many columns turn; the others pass through. None: D where cos has D or D / 2 columns,
            else as many as cos has.
        compiled: on a CPU with AVX-512 run as a C++ loop, which the first call compiles: bfloat16 or float32.

    Returns:
        of x's dtype, in x's layout (``torch.empty_like``).

    Raises:
        TypeError: another dtype.
        ValueError: shapes that do not fit; cos or sin wants a gradient, which this op does not compute; ``compiled``
            of what that does not serve.
        CompilerError: nothing can be compiled here.
    """
    rotary = _check("rope", {"x": x}, cos, sin, rotary_dim, compiled)
    return _ROPE(x, cos, sin, rotary, interleaved, False, compiled)


def rope_qk(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False, rotary_dim: int | None = None,
    compiled: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return ``(rope(q, ...), rope(k, ...))``, computed in one launch.

    Args:
        q, k: as x of ``rope``; they may differ in heads, strides and dtype.
        cos, sin, interleaved, rotary_dim, compiled: as for ``rope``.

    Raises:
        TypeError, ValueError: as ``rope``.
    """
    rotary = _check("rope_qk", {"q": q, "k": k}, cos, sin, rotary_dim, compiled)
    return _ROPE_QK(q, k, cos, sin, rotary, interleaved, False, compiled)


def run_for(x: Tensor, turned: Tensor, tables: Sequence[Tensor], *, interleaved: bool) -> Run | None:
    """Return ``rope(turned, *tables, compiled=True)`` as a function of tensors like these, without gradients.

    Its result has x's shape.

    Args:
        turned: x, or x with heads and positions exchanged, [B, H, T, D].
        tables: cos and sin, views of the tensors that the function gets.

    Returns:
        a function of x and the two tensors that the tables are views of; None if ``rope`` would copy one of them.
    """
    cos, sin = tables
    rotary = _check("rope", {"x": turned}, cos, sin, None, True)
    out = torch.empty_like(turned)
    if not turned.numel() or any(each.stride(-1) != 1 for each in (turned, out, *tables)):
        return None
    rotate = compiled_for(turned, out, tables[0], _steps(tables), rotary, interleaved, False)
    strides = (out if turned is x else out.transpose(1, 2)).stride()

    def run(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        made = torch.empty_strided(x.shape, strides, dtype=x.dtype, device=x.device)
        rotate(x, made, cos, sin)
        return made

    return run


def _steps(tables: Sequence[Tensor]) -> list[int]:
    """Return the strides of the batch and of positions, of cos and then of sin."""
    return [s for t in tables for s in (t.stride(0) if t.dim() == 3 and t.shape[0] > 1 else 0, t.stride(-2))]


def reference(
    x: Tensor, cos: Tensor, sin: Tensor, rotary_dim: int, interleaved: bool = False, inverse: bool = False
) -> Tensor:
    """Rotate in plain torch, on any device, differentiably."""
    half = rotary_dim // 2
    turned, rest = x[..., :rotary_dim].float(), x[..., rotary_dim:]
    first, second = (slice(0, None, 2), slice(1, None, 2)) if interleaved else (slice(0, half), slice(half, None))
    if x.dim() == 4 and cos.dim() == 3:
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    c, s = cos.float(), sin.float()
    wide = cos.shape[-1] == rotary_dim
    c1, c2, s1, s2 = (c[..., first], c[..., second], s[..., first], s[..., second]) if wide else (c, c, s, s)
    if inverse:
        s1, s2 = -s2, -s1
    a, b = turned[..., first], turned[..., second]
    pairs = (a * c1 - b * s1, b * c2 + a * s2)
    result = torch.stack(pairs, dim=-1).flatten(-2) if interleaved else torch.cat(pairs, dim=-1)
    return torch.cat((result.to(x.dtype), rest), dim=-1)


def _check(
    name: str, tensors: dict[str, Tensor], cos: Tensor, sin: Tensor, rotary_dim: int | None, compiled: bool
) -> int:
    """Raise for arguments that the op, or its compiled loop, does not take; return how many columns turn."""
    check_operands(name, cos=cos, sin=sin, **tensors)
    if torch.is_grad_enabled() and (cos.requires_grad or sin.requires_grad):
        raise ValueError(f"{name} computes no gradient of cos and sin: detach them, or rotate in plain torch.")
    first, *others = tensors.values()
    if not 2 <= first.dim() <= 4:
        raise ValueError(f"{name} takes [B, H, T, D], [B, T, D] or [T, D], got {tuple(first.shape)}.")
    dim = first.shape[-1]
    for x in others:
        if x.dim() != first.dim() or x.shape[-2:] != first.shape[-2:] or (x.dim() > 2 and x.shape[0] != first.shape[0]):
            raise ValueError(
                f"{name} takes q and k that differ in heads only, got {tuple(first.shape)} and {tuple(x.shape)}."
            )
    if cos.shape != sin.shape or cos.dim() not in (2, 3) or cos.shape[-2] != first.shape[-2]:
        raise ValueError(
            f"{name} takes cos and sin of shape [T, columns] or [B, T, columns] with T = {first.shape[-2]}, as in "
            f"{tuple(first.shape)}, got {tuple(cos.shape)} and {tuple(sin.shape)}."
        )
    if cos.dim() == 3 and (first.dim() == 2 or cos.shape[0] not in (1, first.shape[0])):
        raise ValueError(f"{name}: cos of shape {tuple(cos.shape)} does not broadcast to {tuple(first.shape)}.")
    width = cos.shape[-1]
    # Half of D columns may mean D / 2 pairs or R = D / 2: the former is usual, the latter wants rotary_dim.
    rotary = rotary_dim if rotary_dim is not None else dim if 2 * width == dim else width
    if rotary % 2 or not 0 < rotary <= dim or width not in (rotary, rotary // 2):
        raise ValueError(
            f"{name}: cos has {width} columns, which is neither R nor R / 2 for an even R = {rotary} of at most "
            f"D = {dim} columns to rotate. Give rotary_dim where R is neither D nor cos's columns."
        )
    if compiled:
        check_looped(name, *tensors.values(), cos, sin)
        if cos.dtype != sin.dtype:
            raise ValueError(f"{name}(compiled=True) takes cos and sin of one dtype, got {cos.dtype} and {sin.dtype}.")
    return rotary


def _launch(
    tensors: list[Tensor], outs: list[Tensor], cos: Tensor, sin: Tensor, rotary: int, interleaved: bool, inverse: bool,
    compiled: bool,
) -> None:  # fmt: skip
    tensors, cos, sin = [*map(_in_rows, tensors)], _in_rows(cos), _in_rows(sin)
    if compiled:
        for x, out in zip(map(_four, tensors), map(_four, outs), strict=True):
            compiled_for(x, out, cos, _steps((cos, sin)), rotary, interleaved, inverse)(x, out, cos, sin)
        return
    lie = [(x.shape, x.stride()) for x in (*tensors, *outs, cos, sin)]
    launch = _bound(rotary, interleaved, inverse, *lie)
    k, k_out = (tensors[1], outs[1]) if len(tensors) > 1 else (None, None)
    launch(tensors[0], outs[0], k, k_out, cos, sin)


@lru_cache(maxsize=1024)
def _bound(rotary: int, interleaved: bool, inverse: bool, *lie: tuple[tuple[int, ...], tuple[int, ...]]) -> Bound:
    """Return the bound kernel for (shape, strides) of q, maybe k, their results, cos and sin."""
    *both, cos, sin = [torch.empty_strided(*each, device="meta") for each in lie]
    four = [*map(_four, both)]
    pairs = [x for pair in zip(four[: len(four) // 2], four[len(four) // 2 :], strict=True) for x in pair]
    batch, _, positions, dim = four[0].shape
    heads = [x.shape[1] for x in pairs[::2]] + [0] * (2 - len(pairs[::2]))
    shape = _shape(positions, dim, rotary)
    blocks = (positions + shape["POSITIONS"] - 1) // shape["POSITIONS"]
    # Heads of a program share its cos and sin, but the device must be full.
    chunk = max(1, min(max(heads), sum(heads) * batch * blocks // _PROGRAMS))
    chunks = [(n + chunk - 1) // chunk for n in heads]
    strides = [s for x in pairs for s in x.stride()[:3]] + [0] * (12 - 3 * len(pairs))
    return Bound(
        rope_kernel, (batch * blocks, sum(chunks)), positions, blocks, *heads, chunk, chunks[0], *strides,
        *_steps((cos, sin)), rotary // 2, dim, cos.shape[-1] == rotary, interleaved, inverse,
        shape["POSITIONS"], shape["BLOCK"], shape["PASS"], num_warps=_WARPS, enable_fp_fusion=False,
    )  # fmt: skip


def _in_rows(x: Tensor) -> Tensor:
    """Return x with adjacent columns and its negation resolved; a copy if need be."""
    # A kernel reads memory, which a lazily negated tensor shares with its original.
    if x.is_neg():
        x = x.resolve_neg()
    return x if x.stride(-1) == 1 else x.contiguous()


def _shape(positions: int, dim: int, rotary: int) -> dict[str, int]:
    """Return the block sizes: a tile of _TILE pairs, or of fewer if more columns pass than rotate."""
    block = 1 << (rotary // 2 - 1).bit_length()
    rest = 1 << (dim - rotary - 1).bit_length() if dim > rotary else 0
    count = max(1, min(2 * _TILE // max(2 * block, rest), 1 << (positions - 1).bit_length()))
    return {"POSITIONS": count, "BLOCK": block, "PASS": rest}


def _four(x: Tensor) -> Tensor:
    """Return x as [B, H, T, D], a view."""
    return x if x.dim() == 4 else x.unsqueeze(1) if x.dim() == 3 else x[None, None]


def _run(
    tensors: list[Tensor], cos: Tensor, sin: Tensor, rotary: int, interleaved: bool, inverse: bool, compiled: bool
) -> list[Tensor]:
    outs = [torch.empty_like(x) for x in tensors]
    # empty_like keeps the order of dimensions, which may put another one than D innermost.
    rows = all(x.numel() and out.stride(-1) == 1 for x, out in zip(tensors, outs, strict=True))
    if rows and (compiled or can_launch(cos.device)):
        _launch(tensors, outs, cos, sin, rotary, interleaved, inverse, compiled)
        return outs
    with torch.no_grad():
        return [
            out.copy_(reference(x, cos, sin, rotary, interleaved, inverse))
            for x, out in zip(tensors, outs, strict=True)
        ]


def _forward(
    x: Tensor, cos: Tensor, sin: Tensor, rotary: int, interleaved: bool, inverse: bool, compiled: bool = False
) -> Tensor:
    return _run([x], cos, sin, rotary, interleaved, inverse, compiled)[0]


def _fake(x: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(x)


def _qk_forward(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    rotary: int,
    interleaved: bool,
    inverse: bool,
    compiled: bool = False,
) -> tuple[Tensor, Tensor]:
    q_out, k_out = _run([q, k], cos, sin, rotary, interleaved, inverse, compiled)
    return q_out, k_out


def _qk_fake(q: Tensor, k: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    *tensors, ctx.rotary, ctx.interleaved, ctx.inverse, ctx.compiled = inputs
    # A rotation is linear: its backward needs the angles alone.
    ctx.save_for_backward(*tensors[-2:])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dy: Tensor) -> Tensor:
    return _ROPE(dy, *ctx.saved_tensors, ctx.rotary, ctx.interleaved, not ctx.inverse, ctx.compiled)


def _qk_backward(ctx: Any, dq: Tensor | None, dk: Tensor | None) -> tuple[Tensor | None, ...]:
    rest = (*ctx.saved_tensors, ctx.rotary, ctx.interleaved, not ctx.inverse, ctx.compiled)
    # A missing gradient is zero: rotate the other one alone.
    if dq is not None and dk is not None:
        dq, dk = _ROPE_QK(dq, dk, *rest)
    else:
        dq, dk = (None if d is None else _ROPE(d, *rest) for d in (dq, dk))
    return dq, dk


_ROPE = KernelOp("rope", _forward, _fake, backward=_backward, setup_context=_setup)
_ROPE_QK = KernelOp("rope_qk", _qk_forward, _qk_fake, backward=_qk_backward, setup_context=_setup)


def compiled_for(
    x: Tensor, out: Tensor, cos: Tensor, tables: Sequence[int], rotary: int, interleaved: bool, inverse: bool
) -> Run:
    """Return the rotation as a function of (x, out, cos, sin) with the shapes and strides of these.

    It runs torch's number of threads.

    Args:
        x, out: bfloat16 or float32 [B, H, T, D] on a CPU, adjacent columns.
        cos: bfloat16 or float32 [..., T, columns], columns next to each other.
        tables: strides of cos's batch and positions and of sin's.
        rotary: columns that turn.

    Raises:
        CompilerError: nothing can be compiled here.
    """
    # The members of the struct of the C++ source, which are all int64: built once, since each call passes them.
    members = [*x.shape, rotary // 2, *x.stride()[:3], *out.stride()[:3], *tables]
    members += [cos.shape[-1] == rotary, interleaved, inverse]
    sizes = (ctypes.c_int64 * len(members))(*members)
    low, low_tables = (int(each.dtype is torch.bfloat16) for each in (x, cos))
    function = _function()

    def run(x: Tensor, out: Tensor, cos: Tensor, sin: Tensor) -> None:
        function(
            sizes, low, low_tables, x.data_ptr(), cos.data_ptr(), sin.data_ptr(), out.data_ptr(),
            torch.get_num_threads(),
        )  # fmt: skip

    return run


@functools.cache
def _function() -> Any:
    function = compiled("cpu/rope.cpp").fxprec_rope
    function.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_int, *[ctypes.c_void_p] * 4, ctypes.c_int)
    return function
