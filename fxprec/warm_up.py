"""Capture at convert time from example inputs, leaving no trace on buffers, gradients and random state."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fxprec.conversion import Conversion
from fxprec.errors import FxprecError

__all__ = ["warm_up"]


def warm_up(module: nn.Module, conversion: Conversion, example_inputs: Sequence[Any] | Mapping[str, Any]) -> None:
    """Run the converted forward once on the example inputs, so that its graph exists with dtypes and shapes.

    Raises:
        TypeError: not a tuple or dict; the wrong count or an unknown keyword.
        ValueError: a tensor on another device than the parameters, or of a shape that the model does not take.
    """
    args, kwargs = _split(example_inputs)
    name = conversion.original_class.__name__
    try:
        conversion.signature.bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(
            f"example_inputs {list(kwargs) or len(args)} do not fit {name}.forward{conversion.signature}: {error}. "
            "Give a tuple of positional or a dict of keyword arguments, as the model is called"
        ) from None
    _same_device(name, conversion.settings.device, args, kwargs)
    with _untouched(module):
        try:
            module(*args, **kwargs)
        except (FxprecError, NotImplementedError):
            raise
        except Exception as error:
            shapes = ", ".join(str(tuple(a.shape)) for a in (*args, *kwargs.values()) if isinstance(a, Tensor))
            raise ValueError(
                f"example_inputs of shapes {shapes}: {name}.forward failed on them: {error}. "
                "Give inputs on which the model runs"
            ) from error


def _split(example_inputs: Sequence[Any] | Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(example_inputs, Mapping):
        return (), dict(example_inputs)
    if isinstance(example_inputs, tuple | list):
        return tuple(example_inputs), {}
    raise TypeError(
        f"example_inputs must be a tuple of positional or a dict of keyword inputs, not {type(example_inputs).__name__}"
        + (": write (x,)" if isinstance(example_inputs, Tensor) else "")
    )


def _same_device(name: str, device: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for where, value in [*enumerate(args), *kwargs.items()]:
        if isinstance(value, Tensor) and value.dim() and value.device.type != device:
            raise ValueError(
                f"example input {where!r} is on {value.device}, the parameters of {name} are on {device}: "
                f"move it there with .to({device!r})"
            )


@contextlib.contextmanager
def _untouched(module: nn.Module) -> Iterator[None]:
    buffers = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
    devices = sorted({p.device.index or 0 for p in module.parameters() if p.device.type == "cuda"})
    with torch.random.fork_rng(devices=devices):
        try:
            yield
        finally:
            with torch.no_grad():
                for buffer, before in buffers:
                    buffer.copy_(before)
