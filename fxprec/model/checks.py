"""What ``convert`` refuses before it touches anything: what, where, why, and what to do."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from fxprec.errors import ConversionError, ServiceWarning
from fxprec.kernels.launch.operands import LOW_DTYPES
from fxprec.model.conversion import is_converted
from fxprec.model.swapped import is_host
from fxprec.passes.policy.policy import Policy
from fxprec.settings import Settings, why_no_kernels
from fxprec.torch_internals import is_compiled

_WRAPPERS = {
    "DistributedDataParallel": "torch.nn.parallel",
    "DataParallel": "torch.nn.parallel",
    "FullyShardedDataParallel": "torch.distributed.fsdp",
}
#: Homes of modules whose weights are packed and quantized: no parameters, that one could see their dtypes.
_QUANTIZED = ("torch.ao.nn.quantized", "torch.ao.nn.intrinsic.quantized", "torch.ao.nn.sparse.quantized")


def settled_device(model: Any, example_inputs: Any) -> str:
    """The device type that the conversion is for: that of the parameters, else of the example inputs, else "cpu"."""
    tensors: list[Any] = []
    if isinstance(model, nn.Module):
        tensors += [parameter for module in model.modules() for parameter in module._parameters.values()]
    elif isinstance(model, ExportedProgram):
        tensors += list(model.state_dict.values())
    if isinstance(example_inputs, Mapping):
        tensors += list(example_inputs.values())
    elif isinstance(example_inputs, Sequence):
        tensors += list(example_inputs)
    kinds = [tensor.device.type for tensor in tensors if isinstance(tensor, Tensor)]
    if "cuda" in kinds:  # a model in parts, some of them (an embedding) on the CPU
        return "cuda"
    return next((kind for kind in kinds if kind != "meta"), "cpu")


def refuse_unfit(model: Any, settings: Settings) -> None:
    """Raise for a model or an environment that cannot be converted; nothing was changed.

    Raises:
        TypeError: not a module, GraphModule, ExportedProgram or function.
        ConversionError: see ``convert``.
    """
    if isinstance(model, type) or not (isinstance(model, nn.Module | ExportedProgram) or callable(model)):
        what = f"the class {model.__name__}: make an object of it" if isinstance(model, type) else type(model).__name__
        raise TypeError(f"convert takes an nn.Module, GraphModule, ExportedProgram or function of tensors, not {what}")
    for device in {settings.device, "cpu", "cuda"}:
        if torch.is_autocast_enabled(device):
            raise ConversionError(
                f"convert was called under torch.autocast({device!r}): both would insert casts. "
                "Convert outside of it, and leave the autocast context away when training"
            )
    _refuse_no_kernels(settings)
    if isinstance(model, nn.Module):
        _refuse_module(model)
        _refuse_weights(model)


def check_module_overrides(policy: Policy, module: nn.Module) -> None:
    """Raise PolicyError for an override of a module path or class that the model does not have, before any capture."""
    of_modules = tuple(override for override in policy.overrides if override.kind == "modules")
    if of_modules:
        replace(policy, overrides=of_modules, rules=()).check_matches((), dict(module.named_modules()), ())


def _refuse_no_kernels(settings: Settings) -> None:
    """``fuse`` asks for regions, and there can be none; of "auto" on CUDA a warning says why kernels do not run."""
    named = settings.fuse in (True, "aten") or isinstance(settings.fuse, Mapping)
    if settings.regions or not (named or (settings.fuse == "auto" and settings.device == "cuda")):
        return
    if settings.policy.level == "O0":
        why = "level O0 is equal bit for bit, which no kernel of another order is: take O1"
    elif settings.executor == "inductor":
        why = "executor='inductor' fuses by itself: leave one of them out"
    elif settings.fuse is True and settings.device == "cpu":
        why = f"{settings.why_not_compiled}. fuse='auto' takes native mixed-precision kernels"
    else:
        why = (
            f"{why_no_kernels(settings.device)}. fuse='auto' takes native mixed-precision kernels there, "
            "fuse='aten' forms the regions and runs them op by op"
        )
        if not named:
            warnings.warn(
                f"no fused kernels: {why_no_kernels(settings.device)}; torch's own serve", ServiceWarning, stacklevel=4
            )
    if named:
        raise ConversionError(f"fuse={settings.fuse!r}: {why}")


def _refuse_module(model: nn.Module) -> None:
    name = type(model).__name__
    if _is_wrapper(model):
        raise ConversionError(
            f"the model is wrapped in {name}: convert first, then wrap: {name}(fxprec.convert(model)[0])"
        )
    if is_compiled(model):
        raise ConversionError(
            "the model is a torch.compile'd module: convert the original (model._orig_mod), "
            "with executor='inductor' to have it compiled"
        )
    if isinstance(model, torch.jit.ScriptModule):
        raise ConversionError(
            f"{name} is a TorchScript module, whose graph fxprec cannot read: convert the eager model"
        )
    seen: set[type] = set()
    for path, module in model.named_modules():
        if is_converted(module):
            where = f"its submodule {path!r}" if path else name
            raise ConversionError(f"{where} is converted already: fxprec.revert it first, then convert again")
        if is_host(module):
            where = f"its submodule {path!r}" if path else name
            raise ConversionError(
                f"{where} is part of a converted model, which runs methods of it (methods=...): "
                "fxprec.revert that model first"
            )
        cls = type(module)
        if cls in seen:
            continue
        if cls.__module__.startswith(_QUANTIZED):
            raise ConversionError(
                f"{path or name} is a quantized {cls.__name__}: fxprec rewrites FP32 models; "
                "convert the one that was quantized"
            )
        if path and _is_wrapper(module):
            raise ConversionError(f"the submodule {path!r} is wrapped in {cls.__name__}: convert first, then wrap")
        seen.add(cls)


def _is_wrapper(module: nn.Module) -> bool:
    """Return whether it is one of torch's parallel wrappers, or derived from one; by name: FSDP is not imported."""
    bases = type(module).__mro__
    return any(base.__module__.startswith(_WRAPPERS.get(base.__name__, "no such module")) for base in bases)


def _refuse_weights(model: nn.Module) -> None:
    tensors = [
        tensor
        for module in model.modules()
        for tensor in (*module._parameters.values(), *module._buffers.values())
        if tensor is not None
    ]
    if not tensors:
        return

    def first(wanted: Callable[[Tensor], bool]) -> str:
        """Names are looked up where they are needed: most models are converted."""
        named = chain(model.named_parameters(), model.named_buffers())
        return next(path for path, tensor in named if wanted(tensor))

    name = type(model).__name__
    if any(tensor.is_quantized for tensor in tensors):
        raise ConversionError(
            f"{name}.{first(lambda tensor: tensor.is_quantized)} is quantized: fxprec rewrites FP32 models; "
            "convert before quantizing"
        )
    dtypes = {tensor.dtype for tensor in tensors if tensor.is_floating_point() or tensor.is_complex()}
    if not dtypes or torch.float32 in dtypes:
        return
    kinds = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
    if dtypes <= set(LOW_DTYPES):
        advice = (
            "its FP32 values are gone, and without them small updates are lost. Load the model in FP32 "
            "(transformers: dtype=torch.float32; else model.float()) and convert that"
        )
    else:
        advice = "fxprec lowers float32 only; leave such a model as it is, or convert its float32 parts"
    such = first(lambda tensor: tensor.dtype in dtypes)
    raise ConversionError(f"all weights of {name} are {kinds} (such as {such!r}): {advice}")
