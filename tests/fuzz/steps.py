"""The steps of random programs: layers, norms, pointwise and in-place ops, views, writes to parts, casts, masks.

A program is a list of steps over values of shape (2, 3, 4). Masks and indices come from the inputs, whose values no
dtype rounds.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

__all__ = ["STEPS", "Step", "Values"]

FP32, FP64, BF16, FP16 = torch.float32, torch.float64, torch.bfloat16, torch.float16


@dataclass
class Values:
    """What a program has made so far: ``floats`` are (value, dtype in the original program)."""

    model: Any
    floats: list[tuple[Any, torch.dtype]]
    masks: list[Any]
    indices: list[Any]

    def any(self, at: int) -> tuple[Any, torch.dtype]:
        """The latest at 0."""
        return self.floats[-1 - at % len(self.floats)]

    def fp32(self, at: int) -> Any:
        # by ==: a trace declines a dtype that is compared by identity
        chosen = [value for value, dtype in self.floats if dtype == FP32]
        return chosen[-1 - at % len(chosen)]

    def mask(self, at: int) -> Any:
        return self.masks[at % len(self.masks)]

    def index(self, at: int) -> Any:
        return self.indices[at % len(self.indices)]

    def add(self, value: Any, dtype: torch.dtype = FP32) -> None:
        self.floats.append((value, dtype))


Step = Callable[[Values, int, int], None]


def fp32(function: Callable[[Any, Any], Any]) -> Step:
    """An op on one FP32 value: ``function(model, x)``."""
    return lambda values, a, b: values.add(function(values.model, values.fp32(a)))


def unary(function: Callable[[Any], Any]) -> Step:
    """An op on one value of any float dtype that keeps it."""

    def step(values: Values, a: int, b: int) -> None:
        value, dtype = values.any(a)
        values.add(function(value), dtype)

    return step


def binary(function: Callable[[Any, Any], Any]) -> Step:
    def step(values: Values, a: int, b: int) -> None:
        (x, first), (y, second) = values.any(a), values.any(b)
        values.add(function(x, y), torch.promote_types(first, second))

    return step


def to(dtype: torch.dtype, function: Callable[[Any], Any]) -> Step:
    """A user's cast."""
    return lambda values, a, b: values.add(function(values.any(a)[0]), dtype)


def write(function: Callable[[Any, Any], Any]) -> Step:
    """An in-place op; what it returns (the target) counts as a value too."""

    def step(values: Values, a: int, b: int) -> None:
        (target, dtype), (other, _) = values.any(a), values.any(b)
        result = function(target, other)
        if result is not None:
            values.add(result, dtype)

    return step


def same(function: Callable[[Any, Any], Any]) -> Step:
    """An op whose kernel wants two values of one dtype: FP32 in the original program."""
    return lambda values, a, b: values.add(function(values.fp32(a), values.fp32(b)))


def masked(function: Callable[[Any, Any, Any], Any]) -> Step:
    def step(values: Values, a: int, b: int) -> None:
        values.add(function(values.fp32(a), values.fp32(b), values.mask(a + b)))

    return step


def indexed(function: Callable[[Any, Any, Any], Any]) -> Step:
    def step(values: Values, a: int, b: int) -> None:
        values.add(function(values.fp32(a), values.fp32(b), values.index(a + b)))

    return step


def _swap_halves(x: Any) -> Any:
    first, second = x.chunk(2, -1)
    return torch.cat([second, first], -1)


def _swap_halves_of_tuple(x: Any) -> Any:
    halves = torch.split(x, 2, -1)
    return torch.cat([halves[1], halves[0]], -1)


def _tuple_as_it_is(x: Any) -> Any:
    return torch.stack(x.unbind(1), 1)


def _set_row(x: Any, y: Any) -> None:
    x[:, 0] = y[:, 1]


def _set_masked(x: Any, y: Any) -> None:
    x[:, :, 0] = 0.25


def _scale_part(x: Any, y: Any) -> None:
    x[:, 1:].mul_(0.5)


def _add_to_part(x: Any, y: Any) -> None:
    part = x.transpose(1, 2)[:, 2:]
    part += y.transpose(1, 2)[:, :2]


def _attention(model: Any, x: Any) -> Any:
    scores = x @ x.transpose(1, 2) * 0.5
    return scores.softmax(-1) @ x


def _masked_attention(x: Any, y: Any, mask: Any) -> Any:
    scores = (x @ y.transpose(1, 2)).masked_fill(mask[:, :, :3], torch.finfo(torch.float32).min)
    return scores.softmax(-1) @ y


def _normalize(x: Any) -> Any:
    return (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True) + 0.1).sqrt()


STEPS: dict[str, Step] = {
    "linear": fp32(lambda model, x: F.linear(x, model.weight, model.bias)),
    "linear_shared": fp32(lambda model, x: F.linear(x, model.weight)),
    "matmul": fp32(lambda model, x: x @ model.weight),
    "conv1d": fp32(lambda model, x: F.conv1d(x, model.kernel, padding=1)),
    "addmm": fp32(lambda model, x: torch.addmm(model.bias, x.reshape(6, 4), model.weight).view(2, 3, 4)),
    "baddbmm": same(lambda x, y: torch.baddbmm(x, x[:, :, :3], y)),
    "bmm": same(lambda x, y: torch.bmm(x[:, :, :3], y)),
    "einsum": fp32(lambda model, x: torch.einsum("btd,de->bte", x, model.weight)),
    "attention": fp32(_attention),
    "masked_attention": masked(_masked_attention),
    "layer_norm": fp32(lambda model, x: F.layer_norm(x, (4,), model.gain, model.bias, 0.1)),
    "group_norm": fp32(lambda model, x: F.group_norm(x, 3, eps=0.1)),
    "batch_norm": fp32(lambda model, x: F.batch_norm(x, model.mean, model.var, training=True, eps=0.1)),
    "rms_norm": fp32(lambda model, x: F.rms_norm(x, (4,), eps=0.1)),
    "normalize": unary(_normalize),
    "softmax": unary(lambda x: x.softmax(-1)),
    "log_softmax": unary(lambda x: F.log_softmax(x, -1)),
    "gelu": unary(F.gelu),
    "relu": unary(torch.relu),
    "tanh": unary(torch.tanh),
    "exp": unary(lambda x: torch.exp(x.tanh())),
    "dropout": unary(lambda x: F.dropout(x, 0.0)),
    "dropout_eval": unary(lambda x: F.dropout(x, 0.5, training=False)),
    "add": binary(lambda x, y: x + y),
    "sub": binary(torch.sub),
    "mul": binary(lambda x, y: x * y.tanh()),
    "div": binary(lambda x, y: x / (y * y + 1)),
    "maximum": binary(torch.maximum),
    "add_number": unary(lambda x: x + 0.5),
    "halve": unary(lambda x: x * 0.5),
    "add_one": unary(lambda x: 1 + x),
    "sqrt": unary(lambda x: (x.abs() + 1e-3).sqrt()),
    "cat": binary(lambda x, y: torch.cat([x, y], -1)[..., 2:6]),
    "stack": binary(lambda x, y: torch.stack([x, y]).mean(0)),
    "halves": unary(_swap_halves),
    "split": unary(_swap_halves_of_tuple),
    "unbind": unary(_tuple_as_it_is),
    "max_dim": unary(lambda x: x.max(-1, keepdim=True)[0] - x),
    "topk": unary(lambda x: x.topk(4).values),
    "sum": unary(lambda x: x - x.sum(-1, keepdim=True) * 0.25),
    "mean_all": unary(lambda x: x + x.mean()),
    "amax": unary(lambda x: x - x.amax(1, keepdim=True)),
    "cumsum": unary(lambda x: x.cumsum(1) * 0.5),
    "where": masked(lambda x, y, mask: torch.where(mask, x, y)),
    "where_number": masked(lambda x, y, mask: torch.where(mask, x, 0.125)),
    "masked_fill": masked(lambda x, y, mask: x.masked_fill(mask, -0.5)),
    "mask_times": masked(lambda x, y, mask: x * mask),
    "embedding": lambda values, a, b: values.add(F.embedding(values.index(a), values.model.table)),
    "gather": indexed(lambda x, y, index: x.gather(2, index[..., None].expand(2, 3, 4))),
    "scatter_add": indexed(lambda x, y, index: x.scatter_add(2, index[..., None], y)),
    "index_add": indexed(lambda x, y, index: x.index_add(1, index[0] % 3, y)),
    "index_put": indexed(lambda x, y, index: x.index_put((index[:, 0] % 2,), y)),
    "int_add": indexed(lambda x, y, index: x + index[..., None]),
    "lerp": same(lambda x, y: torch.lerp(x, y, 0.25)),
    "one_hot": lambda values, a, b: values.add(F.one_hot(values.index(a), 4) * values.fp32(b)),
    "view": unary(lambda x: x.view(6, 4).view(2, 3, 4)),
    "reshape": unary(lambda x: x.reshape(-1).reshape(2, 3, 4)),
    "transpose": unary(lambda x: x.transpose(1, 2).transpose(1, 2)),
    "slice": unary(lambda x: x[:, :]),
    "contiguous": unary(lambda x: x.contiguous()),
    "clone": unary(torch.clone),
    "detach": unary(lambda x: x.detach()),
    "float": to(FP32, lambda x: x.float()),
    "to_float": to(FP32, lambda x: x.to(torch.float32)),
    "double": to(FP64, lambda x: x.double()),
    "bfloat16": to(BF16, lambda x: x.bfloat16()),
    "half": to(FP16, lambda x: x.to(torch.float16)),
    "zeros_like": unary(torch.zeros_like),
    "new_ones": unary(lambda x: x.new_ones(2, 3, 4)),
    "add_": write(lambda x, y: x.add_(y)),
    "iadd": write(operator.iadd),
    "mul_": write(lambda x, y: x.mul_(0.5)),
    "relu_": write(lambda x, y: x.relu_()),
    "relu_inplace": write(lambda x, y: F.relu(x, inplace=True)),
    "tanh_": write(lambda x, y: torch.tanh_(x)),
    "exp_": write(lambda x, y: x.tanh_().exp_()),
    "clamp_": write(lambda x, y: x.clamp_(-1, 1)),
    "copy_": write(lambda x, y: x.copy_(y)),
    "zero_": write(lambda x, y: x.zero_()),
    "set_row": write(_set_row),
    "set_masked": write(_set_masked),
    "scale_part": write(_scale_part),
    "add_to_part": write(_add_to_part),
}
