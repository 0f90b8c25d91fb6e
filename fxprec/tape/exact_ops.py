"""Write ops anew for the reference, in plain torch with derivatives: kernels, and what has no meaning in float64.

An op that is not here is called as it is, on float64 tensors. Pure draws (``rand``, ``bernoulli_``) are not computed at
all: the reference takes what the run drew. What computes on its draws is told them.

A backward kernel is an op without autograd, which computes in FP32 whatever it is given. Of what a forward has saved
norms read mean and deviation: they have the values that were saved, and derivatives as functions of the input. Softmax
reads its result. A cross entropy that makes gradients in its forward has these as results, differentiable there.

Attention (torch's CPU kernel and ours) has no derivative in a mask, in what a forward keeps, or in its backward::

    forward     S = scale * q k^T + mask      out = P v      P = softmax(S) = exp(S - norms)
    backward    reads q, k, v, mask, dout, and what was kept: P (products), nothing (recomputed, compiled), or norms
                and out (torch)

An error of what was kept is rounding of the forward that kept it: so both results of a forward are differentiable, and
a backward is in what it reads of them.

A region's forward stores its outputs and the statistics that its backward starts from, the backward gradients and, of
what does not vary along rows, partial sums of its blocks: here the first block has the whole sum.

Source of attention's formulas: Dao et al., "FlashAttention", NeurIPS 2022, appendix B.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fxprec.kernels.calls import depthwise_conv2d, layer_norm
from fxprec.kernels.cpu.attention import plain_gradients, scores
from fxprec.kernels.cpu.attention_products import in_blocks, out_of_blocks
from fxprec.kernels.nn import max_pool
from fxprec.kernels.nn.cross_entropy_reference import count_targets, reference
from fxprec.kernels.rows.program.layout import Layout, Spec
from fxprec.kernels.rows.program.row_program import Store
from fxprec.kernels.rows.run.evaluate import evaluate, raw_gradients
from fxprec.kernels.rows.run.plan import plan_of
from fxprec.passes.torch_internals import schema_of
from fxprec.torch_internals import aten_flash_attention_for_cpu

_aten = torch.ops.aten


def _normalized(rows: Tensor, mean: Tensor | None, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows less their mean, over their deviation, and 1 / deviation; both as [rows, 1] as they were saved."""
    if mean is not None:
        own = rows.mean(1, keepdim=True)
        # Saved statistics give the values, the rows' own ones the derivatives.
        rows = rows - (mean.detach() + own - own.detach())
    square, rstd = rows.square().mean(1, keepdim=True), rstd.detach()
    rstd = rstd - 0.5 * rstd**3 * (square - square.detach())
    return rows * rstd, rstd


def _through(gradient: Tensor, value: Tensor, rstd: Tensor) -> Tensor:
    """Return the gradient of rows, given that of their normalized values."""
    inner = gradient - value * (gradient * value).mean(1, keepdim=True)
    return (inner - gradient.mean(1, keepdim=True)) * rstd


def _group_norm_backward(
    dy: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, statistics: Tensor, groups: int, silu: bool,
    wanted: Sequence[bool],
) -> list[Tensor]:  # fmt: skip
    shape, rows = (1, -1, *(1,) * (x.dim() - 2)), (len(x) * groups, -1)
    others = [0, *range(2, x.dim())]
    value, rstd = _normalized(x.reshape(rows), *(each.reshape(-1, 1) for each in statistics))
    spread, scale = value.view(x.shape), x.new_ones(()) if weight is None else weight.view(shape)
    if silu:
        z = spread * scale if bias is None else spread * scale + bias.view(shape)
        dy = dy * z.sigmoid() * (1 + z * (1 - z.sigmoid()))  # torch's own op has no derivative
    dx = _through((dy * scale).reshape(rows), value, rstd).view(x.shape)
    found = (dx, (dy * spread).sum(others), dy.sum(others))
    return [each for each, want in zip(found, wanted, strict=True) if want]


def _batch_norm_backward(
    dy: Tensor, x: Tensor, y: Tensor | None, mean: Tensor, spread: Tensor, weight: Tensor | None, bias: Tensor | None,
    eps: float, relu: bool, training: bool, input: bool, affine: bool, residual: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    def channels(whole: Tensor) -> Tensor:
        return whole.movedim(1, 0).flatten(1)

    def whole(rows: Tensor) -> Tensor:
        return rows.view(x.movedim(1, 0).shape).movedim(0, 1)

    # Rows are channels here, as the formulas of all norms are those of rows.
    gradient, scale = channels(dy), x.new_ones(()) if weight is None else weight[:, None]
    if training:
        value, rstd = _normalized(channels(x), mean[:, None], spread[:, None])
    else:
        rstd = (spread[:, None] + eps).rsqrt()
        value = (channels(x) - mean[:, None]) * rstd
    if relu:
        made = value * scale + (0.0 if bias is None else bias[:, None]) if y is None else channels(y)
        gradient = torch.where(made > 0, gradient, 0.0 * made)  # whose derivative is 0, and not unknown
    scaled, none = gradient * scale, x.new_empty(0)
    dx = _through(scaled, value, rstd) if training else scaled * rstd
    sums = ((gradient * value).sum(1), gradient.sum(1)) if affine else (none, none)
    return whole(dx) if input else none, *sums, whole(gradient) if residual else none


def _of_rows(
    logits: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int, smoothing: float, z_loss: float
) -> tuple[Tensor, Tensor]:
    """Return gradients of each row's cross entropy: of its logits, and of its target where that is probabilities."""
    factor = 1.0 if weight is None else weight
    soft, kept = target, None
    if not target.is_floating_point():
        # Ignored rows must give exact zeros, whatever their logits are, nan too.
        kept = (target != ignore_index)[:, None]
        soft = F.one_hot(torch.where(kept[:, 0], target, 0).long(), logits.shape[1]).to(logits.dtype)
    # Smoothing spreads a part of the target over all classes, before the class weights.
    wanted = (soft * (1 - smoothing) + smoothing / logits.shape[1]) * factor
    norms = logits.logsumexp(1, keepdim=True)
    p = (logits - norms).exp()
    gradient = p * (wanted.sum(1, keepdim=True) + 2 * z_loss * norms) - wanted
    of_target = (smoothing - 1) * factor * (logits - norms)
    return gradient if kept is None else torch.where(kept, gradient, 0.0), of_target


def _over(target: Tensor, weight: Tensor | None, ignore_index: int, reduction: str) -> Tensor | float:
    """Return the divisor of a reduction."""
    if reduction != "mean":
        return 1.0
    return max(1, len(target)) if target.is_floating_point() else count_targets(target, weight, ignore_index)


def _cross_entropy(
    logits: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int, reduction: str, smoothing: float,
    z_loss: float, _compiled: bool, gradient: bool,
) -> Any:  # fmt: skip
    settings = (target, weight, ignore_index, reduction, smoothing, z_loss)
    made = logits.new_empty(0)
    if gradient:
        rows, _ = _of_rows(logits, target, weight, ignore_index, smoothing, z_loss)
        made = rows / _over(target, weight, ignore_index, reduction)
    _, stats, denominator, _ = torch.ops.fxprec.cross_entropy(logits.detach(), *settings, False, False)
    return reference(logits, *settings), stats, denominator, made


def _cross_entropy_backward(
    grad: Tensor, logits: Tensor, target: Tensor, weight: Tensor | None, _stats: Tensor, _denominator: Tensor,
    ignore_index: int, reduction: str, smoothing: float, z_loss: float, _compiled: bool, target_gradient: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    of_logits, of_target = _of_rows(logits, target, weight, ignore_index, smoothing, z_loss)
    factor = (grad / _over(target, weight, ignore_index, reduction)).reshape(-1, 1)
    return of_logits * factor, of_target * factor if target_gradient else logits.new_empty(0)


def _linear_cross_entropy(
    hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, ignore_index: int, reduction: str,
    smoothing: float, z_loss: float, chunk: int, wanted: list[bool],
) -> tuple[Any, ...]:  # fmt: skip
    settings = (ignore_index, smoothing, z_loss, chunk)
    loss = reference(F.linear(hidden, weight, bias), target, None, ignore_index, reduction, smoothing, z_loss)
    count = count_targets(target, None, ignore_index) if reduction == "mean" else loss.new_empty(0)
    ones = hidden.new_ones(len(hidden))
    return loss, count, *_linear_cross_entropy_backward(ones, hidden, weight, target, bias, *settings, wanted)


def _linear_cross_entropy_backward(
    grad: Tensor, hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, ignore_index: int,
    smoothing: float, z_loss: float, _chunk: int, wanted: list[bool],
) -> tuple[Tensor, ...]:  # fmt: skip
    rows, _ = _of_rows(F.linear(hidden, weight, bias), target, None, ignore_index, smoothing, z_loss)
    rows = rows * grad[:, None]
    # Empty tensors stand for gradients that nobody wants, as the op's schema has no None.
    found = (rows @ weight, rows.T @ hidden, rows.sum(0))
    return tuple(each if want else hidden.new_empty(0) for each, want in zip(found, wanted, strict=True))


def _scaled_gradient(values: Tensor, factor: Tensor, denominator: Tensor | None, _dtype: torch.dtype) -> Tensor:
    return values * (factor if denominator is None else factor / torch.where(denominator == 0, 1.0, denominator))


def _attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return output, P and norms. A row that attends to nothing gives 0, and has a norm of 0, as in torch's kernel."""
    found = scores(query, key, mask, causal, scale)
    # Softmax of a row of -inf is nan; the kernels give 0.
    nothing = (found == -torch.inf).all(-1)
    norms = found.masked_fill(nothing.unsqueeze(-1), 0.0).logsumexp(-1).masked_fill(nothing, 0.0)
    p = _weights(found, norms)
    return p @ value.repeat_interleave(query.shape[1] // key.shape[1], 1), p, norms


def _weights(found: Tensor, norms: Tensor) -> Tensor:
    """Return P of scores. Some versions of torch have inf for the norm of a row that attends to nothing."""
    return (found - norms.masked_fill(norms.isinf(), 0.0).unsqueeze(-1)).exp()


def _products(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, scale: float, kept: bool
) -> tuple[Tensor, Tensor]:
    out, p, _ = _attend(query, key, value, mask, causal, scale)
    return out, in_blocks(p, key, causal) if kept else p.new_empty(0)


def _products_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, _: Tensor | None, kept: Tensor, causal: bool, scale: float
) -> tuple[Tensor, ...]:
    return plain_gradients(grad, query, key, value, out_of_blocks(kept, query, key, causal), scale)


def _output(*given: Any) -> Tensor:
    return _attend(*given)[0]


def _gradients(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, ...]:
    return plain_gradients(grad, query, key, value, _attend(query, key, value, mask, causal, scale)[1], scale)


def _torchs(
    query: Tensor, key: Tensor, value: Tensor, dropout: float = 0.0, causal: bool = False, *,
    attn_mask: Tensor | None = None, scale: float | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    if not torch.is_grad_enabled():  # the kernel serves, in a quarter of the memory
        return aten_flash_attention_for_cpu(query, key, value, dropout, causal, attn_mask=attn_mask, scale=scale)
    out, _, norms = _attend(query, key, value, attn_mask, causal, _scale(query, scale))
    return out, norms


def _torchs_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, norms: Tensor, _dropout: float, causal: bool,
    *, attn_mask: Tensor | None = None, scale: float | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    factor = _scale(query, scale)
    p = _weights(scores(query, key, attn_mask, causal, factor), norms)
    return plain_gradients(grad, query, key, value, p, factor, (grad * out).sum(-1, keepdim=True))


def _scale(query: Tensor, given: float | None) -> float:
    return query.shape[-1] ** -0.5 if given is None else given


def region_forward(inputs: Sequence[Tensor], seeds: Tensor | None, seed: int, keep: bool, plan: int) -> list[Tensor]:
    """Compute ``fxprec::region_forward`` in the dtype of its inputs."""
    known = plan_of(plan)
    # Statistics are results too, where the backward starts from them.
    specs = (*known.outputs, *(known.statistics if keep else ()))
    program = known.derived.forward
    values = evaluate(program, known.layout, inputs, seeds, seed, _dtype(inputs), rounds=False)
    return [_stored(*each, known.layout) for each in zip(values, program.stores, specs, strict=False)]


def region_backward(
    saved: Sequence[Tensor], cotangents: Sequence[Tensor], seeds: Tensor | None, seed: int, plan: int
) -> list[Tensor]:
    """Compute ``fxprec::region_backward`` in the dtype of what it reads."""
    known = plan_of(plan)
    dtype = _dtype((*saved, *cotangents))  # of a sum nothing is saved
    values = raw_gradients(known, saved, cotangents, seeds, seed, dtype, rounds=False)
    stores, layout = known.backward_program.program.stores, known.layout
    made = [
        _stored(value, store, spec, layout)
        for value, store, spec in zip(values, stores, known.gradients, strict=True)
        if spec is not None
    ]
    sums = [value.reshape(-1) for value, store in zip(values, stores, strict=True) if store.partial]
    if not sums:
        return made
    first = torch.cat(sums)[None]
    # The kernel gives a partial sum for each block, and what reads them adds up: one block may have it all.
    blocks, width = known.backward_launch.partials
    return [*made, torch.cat([first, first.new_zeros(blocks - 1, width)])]


def _dtype(read: Sequence[Tensor]) -> torch.dtype:
    return next(x.dtype for x in read if x.is_floating_point())


def _stored(value: Tensor, store: Store, spec: Spec, layout: Layout) -> Tensor:
    """Return rows x columns as the tensor that the kernel stores: smaller where all along a dimension are the same."""
    shaped = layout.torch_shaped(value.expand(layout.rows, layout.columns if store.columns else 1), store.columns)
    padded = spec.shape + (1,) * spec.dropped
    for dimension, size in enumerate(padded, shaped.dim() - len(padded)):
        if size == 1:
            shaped = shaped.narrow(dimension, 0, 1)
    return shaped.reshape(spec.shape)


#: What an op with dropout of its own, such as attention or an RNN, calls its probability.
_PROBABILITIES: Final = ("dropout_p", "dropout")

#: With fewer there is little to gain.
_CHANNELS: Final = 8
#: Images are taken together until a product has so many columns.
_COLUMNS: Final = 64
#: The mode of ``mkldnn_rnn_layer`` that is an LSTM: the only one that torch calls.
_LSTM: Final = 2


def _fused_rms_norm(x: Tensor, shape: Sequence[int], weight: Tensor | None, eps: float | None) -> tuple[Tensor, Tensor]:
    """Take FP32's ``eps`` where none is given, as the run computes in FP32: float64's would be another function."""
    return _aten._fused_rms_norm(x, shape, weight, torch.finfo(torch.float32).eps if eps is None else eps)


def _convolution(x: Tensor, weight: Tensor, bias: Tensor | None, *options: Any) -> Tensor:
    """Convolve in float64 with one copy of a pixel for each in a kernel's row; torch's copies it for each weight.

    That takes half the time. The kernel's rows are products of [O, C x kernel width] with slices of one matrix.
    """
    stride, padding, dilation, transposed, _, groups = options
    plain = x.dim() == 4 and stride[0] == groups == 1 and not transposed and x.dtype is torch.float64
    if not plain or len(x) == 0 or x.shape[1] < _CHANNELS or x.requires_grad or weight.requires_grad:
        return _aten.convolution(x, weight, bias, *options)
    x = F.pad(x, (padding[1], padding[1], padding[0], padding[0]))
    (images, channels, rows, _), (outputs, _, kernel_rows, kernel_columns) = x.shape, weight.shape
    height = rows - dilation[0] * (kernel_rows - 1)
    width = (x.shape[3] - dilation[1] * (kernel_columns - 1) - 1) // stride[1] + 1
    # A product for each row of the kernel reads one matrix of columns at another offset: no copy for each row.
    by_row = weight.permute(2, 0, 1, 3).flatten(2).contiguous()
    result = x.new_empty(images, outputs, height, width)
    together = -(-_COLUMNS // max(1, height * width))
    for some, made in zip(x.split(together), result.split(together), strict=True):
        columns = x.new_empty(channels, kernel_columns, rows, len(some), width)
        for number in range(kernel_columns):
            first = number * dilation[1]
            read = some[..., first : first + (width - 1) * stride[1] + 1 : stride[1]]
            columns[:, number].copy_(read.permute(1, 2, 0, 3))
        columns = columns.view(channels * kernel_columns, -1)
        line, wanted = len(some) * width, len(some) * width * height
        product = x.new_zeros(outputs, wanted)
        for number, part in enumerate(by_row):
            product.addmm_(part, columns.narrow(1, number * dilation[0] * line, wanted))
        made.copy_(product.view(outputs, height, len(some), width).permute(2, 0, 1, 3))
    return result if bias is None else result.add_(bias.view(-1, 1, 1))


def _native_dropout(drawn: Sequence[Tensor], x: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
    # The reference drops what the run dropped.
    mask = drawn[1]
    return (x * mask / (1 - p) if p < 1 else x * 0) if train is not False else x.clone(), mask


def _rrelu_with_noise(
    drawn: Sequence[Tensor], x: Tensor, noise: Tensor, lower: float, upper: float, training: bool = False, _: Any = None
) -> Tensor:
    slope = drawn[1] if training else (lower + upper) / 2
    noise.copy_(drawn[1])
    return torch.where(x <= 0, x * slope, x)


class _LstmStep(NamedTuple):
    """Time step of an LSTM: gates as in ``nn.LSTM``, the states before it and the cell behind it, all [N, H]."""

    i: Tensor
    f: Tensor
    g: Tensor
    o: Tensor
    hidden: Tensor
    cell: Tensor
    tanh_of_cell: Tensor


def _steps(x: Tensor, w_ih: Tensor, w_hh: Tensor, bias: Tensor, hidden: Tensor, cell: Tensor) -> Iterator[_LstmStep]:
    for inputs in x @ w_ih.T + bias:
        gates = (inputs + hidden @ w_hh.T).chunk(4, -1)
        i, f, g, o = gates[0].sigmoid(), gates[1].sigmoid(), gates[2].tanh(), gates[3].sigmoid()
        tanh_of_cell = (f * cell + i * g).tanh()
        yield _LstmStep(i, f, g, o, hidden, cell, tanh_of_cell)
        hidden, cell = o * tanh_of_cell, f * cell + i * g


def _lstm(
    x: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor, b_hh: Tensor, hx: Tensor, cx: Tensor, reverse: bool,
    batch_sizes: Sequence[int], mode: int, *_: Any,
) -> tuple[Tensor, Tensor, Tensor, None]:  # fmt: skip
    """Run one layer in one direction; oneDNN's has no float64. The workspace of its backward is nobody else's."""
    if mode != _LSTM or batch_sizes:
        raise NotImplementedError(f"mkldnn_rnn_layer of mode {mode}, packed: {bool(batch_sizes)}")
    steps = [*_steps(x.flip(0) if reverse else x, w_ih, w_hh, b_ih + b_hh, hx, cx)]
    hiddens = [step.o * step.tanh_of_cell for step in steps]
    last = steps[-1]
    out = torch.stack(hiddens)
    return out.flip(0) if reverse else out, hiddens[-1], last.f * last.cell + last.i * last.g, None


def _lstm_backward(
    x: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor, b_hh: Tensor, hx: Tensor, cx: Tensor, _out: Tensor,
    _hy: Tensor, _cy: Tensor, g_out: Tensor | None, g_hy: Tensor | None, g_cy: Tensor | None, reverse: bool, *_: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Differentiate ``_lstm`` through time (Hochreiter & Schmidhuber, Neural Computation 1997)."""
    steps = [*_steps(x.flip(0) if reverse else x, w_ih, w_hh, b_ih + b_hh, hx, cx)]
    # Walked from the last step to the first: a hidden state gets a gradient of its output and of the step behind.
    at_steps = [None] * len(steps) if g_out is None else [*(g_out.flip(0) if reverse else g_out)]
    d_hidden = torch.zeros_like(hx) if g_hy is None else g_hy
    d_cell = torch.zeros_like(cx) if g_cy is None else g_cy
    gates = []
    for step, here in zip(reversed(steps), reversed(at_steps), strict=True):
        i, f, g, o, _before, cell, tanh_of_cell = step
        d_hidden = d_hidden if here is None else d_hidden + here
        d_cell = d_cell + d_hidden * o * (1 - tanh_of_cell**2)
        d_gates = (
            d_cell * g * i * (1 - i), d_cell * cell * f * (1 - f), d_cell * i * (1 - g**2),
            d_hidden * tanh_of_cell * o * (1 - o),
        )  # fmt: skip
        gates.append(torch.cat(d_gates, -1))
        d_hidden, d_cell = gates[-1] @ w_hh, d_cell * f
    d_gates = torch.stack(gates[::-1])  # [T, N, 4H]
    d_x, d_bias = d_gates @ w_ih, d_gates.sum((0, 1))
    d_w_ih = torch.einsum("tng,tni->gi", d_gates, x.flip(0) if reverse else x)
    d_w_hh = torch.einsum("tng,tnh->gh", d_gates, torch.stack([step.hidden for step in steps]))
    return d_x.flip(0) if reverse else d_x, d_w_ih, d_w_hh, d_bias, d_bias.clone(), d_hidden, d_cell


#: Op -> what the reference calls, with the same arguments and results.
EXACT: Final[dict[str, Callable[..., Any]]] = {
    "aten::_fused_rms_norm": _fused_rms_norm,
    "aten::convolution": _convolution,
    "aten::mkldnn_rnn_layer": _lstm,
    "aten::mkldnn_rnn_layer_backward": _lstm_backward,
    "fxprec::group_norm_backward": _group_norm_backward,
    "fxprec::batch_norm_backward": _batch_norm_backward,
    "fxprec::cross_entropy": _cross_entropy,
    "fxprec::cross_entropy_backward": _cross_entropy_backward,
    "fxprec::linear_cross_entropy": _linear_cross_entropy,
    "fxprec::linear_cross_entropy_backward": _linear_cross_entropy_backward,
    "fxprec::scaled_gradient": _scaled_gradient,
    "fxprec::max_pool2d_backward": max_pool.backward_reference,
    "fxprec::depthwise_conv2d_backward": depthwise_conv2d.backward_reference,
    "fxprec::layer_norm_backward": layer_norm.backward_reference,
    "aten::_scaled_dot_product_flash_attention_for_cpu": _torchs,
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": _torchs_backward,
    "fxprec::attention": _products,
    "fxprec::attention_backward": _products_backward,
    "fxprec::compiled_attention": _output,
    "fxprec::compiled_attention_backward": _gradients,
    "fxprec::recomputed_attention": _output,
    "fxprec::recomputed_attention_backward": _gradients,
    "fxprec::region_forward": region_forward,
    "fxprec::region_backward": region_backward,
}

#: Those that compute on numbers which they draw: told the run's results first.
DRAWN: Final[dict[str, Callable[..., Any]]] = {
    "aten::native_dropout": _native_dropout,
    "aten::rrelu_with_noise": _rrelu_with_noise,
}


def draws(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether the results of a call are random numbers, and nothing else."""
    if torch.Tag.nondeterministic_seeded not in function.tags or function.name().partition(".")[0] in DRAWN:
        return False
    for position, argument in enumerate(schema_of(function).arguments):
        if argument.name in _PROBABILITIES:
            return bool(args[position] if position < len(args) else kwargs.get(argument.name, argument.default_value))
    return True
