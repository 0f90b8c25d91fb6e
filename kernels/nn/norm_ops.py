"""Layer norm and RMS norm as torch ops: autograd around ``norm_launch``, and the checks of their arguments.

The backward has what the forward wrote: s in the dtype it was rounded to, the statistics of its rows, and the seed of
the dropout. x and residual are not saved. With ``create_graph=True`` it is plain torch on s, which autograd knows as
the forward's result, so a second derivative goes on through s to x and residual.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor

from fxprec.kernels.launch.kernel_op import KernelOp, eager_gradients
from fxprec.kernels.launch.operands import FLOATS, check_operands
from fxprec.kernels.launch.philox import draw_seeds, drop_threshold
from fxprec.kernels.nn.norm_launch import (
    dropped,
    launch_backward,
    launch_forward,
    normalised,
)


class NormOps:
    """The ops of one norm: ``plain`` gives (y, statistics), ``added`` (y, s, statistics); ``backward`` is of both.

    Args:
        center: layer norm; else RMS norm.
    """

    def __init__(self, name: str, center: bool) -> None:
        def plain(
            x: Tensor, weight: Tensor | None, bias: Tensor | None,
            columns: int, eps: float, offset: float, dtype: torch.dtype,
        ) -> tuple[Tensor, Tensor]:  # fmt: skip
            y, _, statistics = launch_forward(x, None, weight, bias, None, columns, eps, 0.0, offset, dtype, center)
            return y, statistics

        def added(
            x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, seed: Tensor | None,
            columns: int, eps: float, p: float, offset: float, dtype: torch.dtype,
        ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
            y, s, statistics = launch_forward(x, residual, weight, bias, seed, columns, eps, p, offset, dtype, center)
            assert s is not None
            return y, s, statistics

        def fake_plain(x: Tensor, weight: Any, bias: Any, columns: int, *rest: Any) -> tuple[Tensor, Tensor]:
            return x.new_empty(x.shape, dtype=rest[-1]), _fake_statistics(x, columns, center)

        def fake_added(x: Tensor, residual: Tensor, weight: Any, bias: Any, seed: Any, columns: int, *rest: Any) -> Any:
            y, s = (x.new_empty(x.shape, dtype=d) for d in (rest[-1], torch.promote_types(x.dtype, residual.dtype)))
            return y, s, _fake_statistics(x, columns, center)

        self.center = center
        self.backward = KernelOp(f"{name}_backward", launch_backward, _fake_backward)
        self.plain = KernelOp(name, plain, fake_plain, backward=self._plain_backward, setup_context=_save_plain)
        self.added = KernelOp(
            f"add_{name}", added, fake_added, backward=self._added_backward, setup_context=_save_added
        )

    def __call__(
        self,
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
        columns: int,
        eps: float,
        p: float,
        offset: float,
        dtype: torch.dtype,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """y, or (y, s) with a residual; p is 0 where nothing is dropped."""
        if residual is None:
            return self.plain(x, weight, bias, columns, eps, offset, dtype)[0]
        seed = draw_seeds(1, x.device) if p else None
        return self.added(x, residual, weight, bias, seed, columns, eps, p, offset, dtype)[:2]

    def _plain_backward(self, ctx: Any, dy: Tensor | None, _: Any) -> tuple[Tensor | None, ...]:
        x, weight, bias, statistics = ctx.saved_tensors
        stream = x.dtype if ctx.needs_input_grad[0] else None
        wanted = (stream, None, *_dtypes(ctx.needs_input_grad[1:3], weight, bias))
        dx, _, dweight, dbias = self._gradients(ctx, dy, None, x, weight, bias, statistics, None, wanted)
        return dx, dweight, dbias, None, None, None, None

    def _added_backward(self, ctx: Any, dy: Tensor | None, ds: Tensor | None, _: Any) -> tuple[Tensor | None, ...]:
        s, weight, bias, statistics, seed = ctx.saved_tensors
        branch, stream = (d if want else None for d, want in zip(ctx.dtypes, ctx.needs_input_grad, strict=False))
        one = not ctx.p and (stream is None or branch is None or stream == branch)  # then the two are one tensor
        pair = (stream or branch, None) if one else (stream, branch)
        wanted = (*pair, *_dtypes(ctx.needs_input_grad[2:4], weight, bias))
        dresidual, dx, dweight, dbias = self._gradients(ctx, dy, ds, s, weight, bias, statistics, seed, wanted)
        if one:
            dresidual, dx = (dresidual if dtype is not None else None for dtype in (stream, branch))
        return dx, dresidual, dweight, dbias, None, None, None, None, None, None

    def _gradients(
        self,
        ctx: Any,
        dy: Tensor | None,
        ds: Tensor | None,
        s: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        statistics: Tensor,
        seed: Tensor | None,
        wanted: tuple[torch.dtype | None, ...],
    ) -> tuple[Tensor | None, ...]:
        """Of s, of x behind dropout, of weight, of bias: each in its wanted dtype; None where there is none."""
        if (dy is None and ds is None) or not any(wanted):
            return (None,) * 4
        if not torch.is_grad_enabled():
            found = iter(self.backward(dy, ds, s, weight, statistics, seed, ctx.columns, ctx.p, ctx.offset, *wanted))
            dresidual, dx, dweight, dbias = (None if dtype is None else next(found) for dtype in wanted)
            if dweight is not None and weight is not None:
                dweight = dweight.view(weight.shape)
            if dbias is not None and bias is not None:
                dbias = dbias.view(bias.shape)
            return dresidual, dx, dweight, dbias
        gradient, dweight, dbias = eager_gradients(partial(_norm, self.center, ctx), (s, weight, bias), (dy,))
        if ds is not None:
            gradient = ds if gradient is None else gradient + ds
        if gradient is None:
            return None, None, dweight, dbias
        stream, branch = wanted[:2]
        dresidual = None if stream is None else gradient.to(stream)
        dx = None if branch is None else dropped(gradient, seed, ctx.columns, ctx.p).to(branch)
        return dresidual, dx, dweight, dbias


def check_arguments(
    name: str,
    x: Tensor,
    normalized_shape: int | Sequence[int],
    parameters: dict[str, Tensor | None],
    residual: Tensor | None,
    dropout_p: float,
    output_dtype: torch.dtype | None,
) -> int:
    """The number of columns of a norm's rows.

    Raises:
        TypeError: a dtype that is none of float32, float16 and bfloat16.
        ValueError: shapes or devices that do not fit, dropout without residual, a rate outside of [0, 1).
    """
    shape = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
    if not shape or tuple(x.shape[-len(shape) :]) != shape:
        raise ValueError(
            f"{name} over normalized_shape {shape} takes x of shape [*, {', '.join(map(str, shape))}], "
            f"got {tuple(x.shape)}."
        )
    check_operands(name, x=x, residual=residual, **parameters)
    for key, tensor in {"residual": residual, **parameters}.items():
        expected = tuple(x.shape) if key == "residual" else shape
        if tensor is not None and tuple(tensor.shape) != expected:
            raise ValueError(f"{name} takes {key} of shape {expected}, got {tuple(tensor.shape)}.")
    if output_dtype is not None and output_dtype not in FLOATS:
        raise TypeError(f"{name} gives float32, float16 or bfloat16, got output_dtype={output_dtype}.")
    drop_threshold(dropout_p)
    if dropout_p and residual is None:
        raise ValueError(f"{name} drops what is added to a residual: give residual, or dropout_p=0.")
    return prod(shape)


def _norm(center: bool, ctx: Any, s: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    return normalised(s, weight, bias, ctx.columns, ctx.eps, ctx.offset, center).to(ctx.dtype)


def _save_plain(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weight, bias, ctx.columns, ctx.eps, ctx.offset, ctx.dtype = inputs
    ctx.p = 0.0
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(x, weight, bias, output[1])


def _save_added(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    x, residual, weight, bias, seed, ctx.columns, ctx.eps, ctx.p, ctx.offset, ctx.dtype = inputs
    ctx.dtypes = x.dtype, residual.dtype
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[2])
    ctx.save_for_backward(output[1], weight, bias, output[2], seed)


def _dtypes(wanted: Sequence[bool], *tensors: Tensor | None) -> list[torch.dtype | None]:
    return [t.dtype if want and t is not None else None for want, t in zip(wanted, tensors, strict=True)]


def _fake_statistics(x: Tensor, columns: int, center: bool) -> Tensor:
    rows = x.numel() // columns if columns else 0
    return x.new_empty((1 + center, rows), dtype=torch.float32)


def _fake_backward(dy: Any, ds: Any, s: Tensor, *rest: Any) -> list[Tensor]:
    columns, dtypes = rest[3], rest[6:]
    shapes = (s.shape, s.shape, (columns,), (columns,))
    return [s.new_empty(shape, dtype=d) for shape, d in zip(shapes, dtypes, strict=True) if d is not None]
