"""Run a model and leave no trace on it: to capture from example inputs, or to measure something."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fxprec.capture.untouched import ModelState, RandomState, copied_inputs
from fxprec.errors import FxprecError
from fxprec.kernels.torch_internals import FakeTensor, is_traceable_wrapper_subclass
from fxprec.model.conversion import Conversion, conversion_of
from fxprec.passes.torch_internals import unlogged
from fxprec.scaling.gradients import late_hooks_aside
from fxprec.torch_internals import NormBase, preserve_version_counter

#: Integers by their size in bytes.
_INTEGERS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


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
        with _untouched(module, conversion, [*module.parameters(), *module.buffers()]), unlogged():
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
    """Let lazy modules take their shapes, and so their classes, from a first call; all else is undone."""
    # Their running statistics get memory in that call, and are written by it.
    shapeless = [part for part in module.modules() if any(map(is_lazy, part.buffers(recurse=False)))]
    conversion.bypassed += 1
    try:
        with torch.no_grad(), values_kept([*module.parameters(), *module.buffers()]):
            module(*args, **kwargs)
    finally:
        conversion.bypassed -= 1
    for part in shapeless:
        if isinstance(part, NormBase):  # made, and written, by that call
            part.reset_running_stats()


@contextlib.contextmanager
def _untouched(module: nn.Module, conversion: Conversion, tensors: Iterable[Tensor]) -> Iterator[None]:
    """Put back a module's attributes, the values of these tensors of its, and every random number generator."""
    state, random = ModelState(module), RandomState()
    written: list[Tensor] = []
    try:
        with values_kept(tensors) as written:
            yield
    finally:
        if any(isinstance(tensor, nn.Parameter) for tensor in written):
            # The version counters are put back: a later write may bring a version that a shadow was copied at, with
            # other values.
            conversion.store.mark_stale()
        state.restore()
        random.restore()


@contextlib.contextmanager
def kept(model: nn.Module) -> Iterator[None]:
    """Give a model no gradients while the context lasts, and put all back after it, random number generators too.

    A backward of a call that was made before finds what it read. Hooks on accumulated gradients do not run within: some
    of them step an optimizer.
    """
    conversion = conversion_of(model)
    calls, gradients = conversion.calls, [(parameter, parameter.grad) for parameter in model.parameters()]
    writes = any(captured.program.writes_weights for captured in conversion.captured)
    written = [*model.buffers(), *(model.parameters() if writes else ())]
    # A measured step must neither add to the user's gradients nor read them.
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        with _untouched(model, conversion, written), late_hooks_aside(parameter for parameter, _ in gradients):
            yield
    finally:
        conversion.calls = calls
        for parameter, gradient in gradients:
            parameter.grad = gradient


@contextlib.contextmanager
def values_kept(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Put back the values of tensors, their memory where ``data`` was assigned to, and their version counters.

    A backward that read them before, and is to run yet, finds what it read. Copies of all values are held meanwhile (of
    a DTensor, of this rank's shard); a tensor that is lazy, fake or on the meta device has no values.

    Yields:
        A list, empty until the context ends: then of the tensors that had been written.
    """
    written: list[Tensor] = []
    tensors = [tensor for tensor in tensors if not is_lazy(tensor)]
    parts = [part for tensor in tensors for part in _with_values(tensor)]
    # The alias keeps the memory, should ``data`` be assigned to; the clone the values.
    before = [(part, part.detach(), part.detach().clone()) for part in parts]
    counted = tuple(tensor for tensor in dict.fromkeys([*tensors, *parts]) if not tensor.is_inference())
    versions = [tensor._version for tensor in counted]
    with preserve_version_counter(counted):
        try:
            yield written
        finally:
            written += [tensor for tensor, version in zip(counted, versions, strict=True) if tensor._version != version]
            written += [part for part, memory, value in before if _put_back(part, memory, value)]


def _with_values(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the tensors that hold the values: those within a DTensor or another wrapper, else the tensor itself."""
    if not is_traceable_wrapper_subclass(tensor):
        if not (tensor.is_meta or isinstance(tensor, FakeTensor)):
            yield tensor
        return
    wrapper: Any = tensor
    for name in wrapper.__tensor_flatten__()[0]:
        if isinstance(part := getattr(wrapper, name), Tensor):  # else a device mesh
            yield from _with_values(part)


def _put_back(tensor: Tensor, memory: Tensor, value: Tensor) -> bool:
    """Give a tensor its memory and the value in it, unless it has both; return whether it had not."""
    # Of other layouts neither address nor bits can be compared: they are copied in any case.
    strided = tensor.layout is torch.strided
    # First the memory, then what is in it.
    moved = strided and _place(tensor) != _place(memory)
    if moved:
        tensor.data = memory
    if strided and memory.numel() and not memory.untyped_storage().nbytes():  # FSDP frees what it had gathered
        return moved
    if strided and torch.equal(_bits(memory), _bits(value)):
        return moved
    with torch.inference_mode(tensor.is_inference()), torch.no_grad():
        tensor.copy_(value)
    return True


def _place(tensor: Tensor) -> tuple[object, ...]:
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def _bits(tensor: Tensor) -> Tensor:
    """Return floats as integers, of which a NaN equals itself."""
    return tensor.view(_INTEGERS[tensor.element_size()]) if tensor.is_floating_point() else tensor
