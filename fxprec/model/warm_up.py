"""Capture at convert time from example inputs, leaving no trace on them, attributes, buffers and random numbers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fxprec.capture.untouched import ModelState, RandomState, copied_inputs
from fxprec.errors import FxprecError
from fxprec.model.conversion import Conversion
from fxprec.passes.torch_internals import unlogged
from fxprec.torch_internals import NormBase, preserve_version_counter


def warm_up(module: nn.Module, conversion: Conversion, example_inputs: Sequence[Any] | Mapping[str, Any]) -> None:
    """Run the converted forward once on the example inputs, so that its graph exists with dtypes and shapes.

    Raises:
        TypeError: not a tuple or dict; the wrong count or an unknown keyword.
        ValueError: a tensor on another device than the parameters, or of a shape that the model does not take.
    """
    args, kwargs = _split(example_inputs)
    name, signature = conversion.name, conversion.method("forward").signature
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(
            f"example_inputs {list(kwargs) or len(args)} do not fit {name}.forward{signature}: {error}. "
            "Give a tuple of positional or a dict of keyword arguments, as the model is called"
        ) from None
    _same_device(module, conversion, args, kwargs)
    try:
        if any(is_lazy(parameter) for parameter in module.parameters()):
            _materialize(module, conversion, *copied_inputs(module, args, kwargs))
        args, kwargs = copied_inputs(module, args, kwargs)
        with _untouched(module), unlogged():
            module(*args, **kwargs)
    except FxprecError:
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
        + (f": write level={example_inputs!r}" if isinstance(example_inputs, str) else "")
        + (": convert takes no optimizer" if isinstance(example_inputs, torch.optim.Optimizer) else "")
    )


def _same_device(module: nn.Module, conversion: Conversion, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    devices = {parameter.device.type for parameter in module.parameters()} or {conversion.settings.device}
    for where, value in [*enumerate(args), *kwargs.items()]:
        if isinstance(value, Tensor) and value.dim() and value.device.type not in devices:
            raise ValueError(
                f"example input {where!r} is on {value.device}, the parameters of {conversion.name} are on "
                f"{' and '.join(sorted(devices))}: move it there with .to({conversion.settings.device!r})"
            )


def _materialize(module: nn.Module, conversion: Conversion, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Lazy modules take their shapes, and so their classes, from a first call: those stay, all else is undone."""
    shapeless = [part for part in module.modules() if any(map(is_lazy, part.buffers(recurse=False)))]
    conversion.bypassed += 1
    try:
        with torch.no_grad(), buffers_kept(module):
            module(*args, **kwargs)
    finally:
        conversion.bypassed -= 1
    for part in shapeless:
        if isinstance(part, NormBase):  # made, and written, by that call
            part.reset_running_stats()


@contextlib.contextmanager
def _untouched(module: nn.Module) -> Iterator[None]:
    """Attributes, buffers and every random number generator as they were, afterwards."""
    state, random = ModelState(module), RandomState()
    try:
        with buffers_kept(module):
            yield
    finally:
        state.restore()
        random.restore()


@contextlib.contextmanager
def buffers_kept(module: nn.Module) -> Iterator[None]:
    """Buffers have their values again afterwards."""
    with values_kept(buffer for buffer in module.buffers() if not is_lazy(buffer)):
        yield


@contextlib.contextmanager
def values_kept(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Tensors have their values again afterwards, and their version counters.

    A backward that read them before, and is to run yet, finds what it read.
    """
    before = [(tensor, tensor.detach().clone()) for tensor in tensors]
    counted = tuple(tensor for tensor, _ in before if not tensor.is_inference())
    with preserve_version_counter(counted):
        try:
            yield
        finally:
            with torch.no_grad():
                for tensor, value in before:
                    if not (tensor.is_meta or torch.equal(tensor, value)):
                        tensor.copy_(value)
