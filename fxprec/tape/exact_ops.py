"""Write torch's ops anew for the reference: those without a float64 kernel, or with another meaning in float64.

An op that is not here is called as it is, on float64 tensors. Pure draws (``rand``, ``bernoulli_``) are not computed at
all: the reference takes what the run drew. What computes on its draws is told them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fxprec.passes.torch_internals import schema_of
from fxprec.tape.kernel_ops import KERNELS

_aten = torch.ops.aten

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
    by_row = weight.permute(2, 0, 1, 3).flatten(2).contiguous()
    result = x.new_empty(images, outputs, height, width)
    for some, made in _together(x, result, height * width):
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


def _together(x: Tensor, result: Tensor, pixels: int) -> Iterator[tuple[Tensor, Tensor]]:
    count = -(-_COLUMNS // max(1, pixels))
    return zip(x.split(count), result.split(count), strict=True)


def _native_dropout(drawn: Sequence[Tensor], x: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
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
    **KERNELS,
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
