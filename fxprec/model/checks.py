"""What ``convert`` refuses before it touches anything: what, where, why, and what to do."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.fx import GraphModule
from torch.jit import ScriptModule

from fxprec.errors import ConversionError, ServiceWarning, did_you_mean
from fxprec.kernels.launch.operands import LOW_DTYPES
from fxprec.model.conversion import is_converted
from fxprec.model.method import MethodName
from fxprec.model.swapped import is_host
from fxprec.passes.policy.policy import Policy
from fxprec.settings import Settings, why_no_kernels
from fxprec.torch_internals import is_compiled

_WRAPPERS = {
    "DistributedDataParallel": "torch.nn.parallel",
    "DataParallel": "torch.nn.parallel",
    "FullyShardedDataParallel": "torch.distributed.fsdp",
}
#: Homes of modules whose weights are packed and quantized: these are no parameters, whose dtypes would tell.
_QUANTIZED = ("torch.ao.nn.quantized", "torch.ao.nn.intrinsic.quantized", "torch.ao.nn.sparse.quantized")


def settled_device(model: Any, example_inputs: Any) -> str:
    """Return the device type to convert for: that of the parameters, else of the example inputs, else "cpu"."""
    tensors: list[Any] = []
    if isinstance(model, nn.Module):
        tensors += [parameter for module in model.modules() for parameter in module._parameters.values()]
    elif isinstance(model, ExportedProgram):
        tensors += list(model.state_dict.values())
    if isinstance(example_inputs, Mapping):
        tensors += list(example_inputs.values())
    elif isinstance(example_inputs, Sequence):
        tensors += list(example_inputs)
    # Meta tensors, of a model that is to be loaded yet, have no device to go by.
    kinds = [tensor.device.type for tensor in tensors if isinstance(tensor, Tensor)]
    # A model in parts, some of them (an embedding) on the CPU.
    if "cuda" in kinds:
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
    # Autocast of any device would cast in what is captured now.
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
    # Ops and nodes are known after a capture only: there are none here. Modules are known at once.
    of_modules = tuple(override for override in policy.overrides if override.kind == "modules")
    if of_modules:
        replace(policy, overrides=of_modules, rules=()).check_matches((), dict(module.named_modules()), ())


def _refuse_no_kernels(settings: Settings) -> None:
    """Raise where ``fuse`` asks for regions that there cannot be; of "auto" on CUDA warn why kernels do not run."""
    # Who named a way of fusing gets an error; who left it to us a warning, on CUDA alone.
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
        # "auto" on CUDA warns here alone: at O0 and with inductor nothing was promised, and nothing is said.
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
    if isinstance(model, ScriptModule):
        raise ConversionError(
            f"{name} is a TorchScript module, whose graph fxprec cannot read: convert the eager model"
        )
    # Classes are asked once: a model has hundreds of modules of a few classes.
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
        # Quantized modules hold packed weights, which no capture can read as parameters.
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
        """Return the name of the first such tensor. Names are made for an error only, since most models pass."""
        named = chain(model.named_parameters(), model.named_buffers())
        return next(path for path, tensor in named if wanted(tensor))

    name = type(model).__name__
    if any(tensor.is_quantized for tensor in tensors):
        raise ConversionError(
            f"{name}.{first(lambda tensor: tensor.is_quantized)} is quantized: fxprec rewrites FP32 models; "
            "convert before quantizing"
        )
    # A model whose weights are all low, or double, has no FP32 to lower.
    dtypes = {tensor.dtype for tensor in tensors if tensor.is_floating_point() or tensor.is_complex()}
    if not dtypes or torch.float32 in dtypes:
        return
    kinds = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
    # Low weights are the common mistake: a checkpoint loaded in bfloat16.
    if dtypes <= set(LOW_DTYPES):
        advice = (
            "its FP32 values are gone, and without them small updates are lost. Load the model in FP32 "
            "(transformers: dtype=torch.float32; else model.float()) and convert that"
        )
    else:
        advice = "fxprec lowers float32 only; leave such a model as it is, or convert its float32 parts"
    such = first(lambda tensor: tensor.dtype in dtypes)
    raise ConversionError(f"all weights of {name} are {kinds} (such as {such!r}): {advice}")


def named_methods(model: nn.Module, methods: Sequence[str]) -> tuple[str, ...]:
    """Return the methods that a user named, each in one spelling: ``"vae.decode"``; a module stands for its forward.

    Raises:
        TypeError: not a sequence of strings.
        ValueError: a name that the model does not have (with the nearest ones), no method of an object, one of
            nn.Module's own, ``forward`` itself, or one name twice.
        ConversionError: in a module whose class cannot be swapped.
    """
    if isinstance(methods, str) or not all(isinstance(name, str) for name in methods):
        raise TypeError(f"methods={methods!r}: give a tuple of names, such as methods=('encode', 'vae.decode')")
    if not methods:
        return ()
    # By the object: a module that stands in two places has one path.
    paths = {id(module): path for path, module in model.named_modules()}
    found: dict[str, str] = {}
    for text in methods:
        name = str(_resolved(model, text, paths))
        if name in found:
            both = f"{found[name]!r} and {text!r} are the same method" if found[name] != text else f"{text!r} twice"
            raise ValueError(f"methods={tuple(methods)!r}: {both}, {name}: name it once")
        found[name] = text
    return tuple(found)


def _resolved(model: nn.Module, text: str, paths: dict[int, str]) -> MethodName:
    owner, left = model, text.split(".")
    while left and isinstance(child := getattr(owner, left[0], None), nn.Module):
        if id(child) not in paths:
            raise ValueError(f"methods: {text!r}: {left[0]!r} is a module, but no submodule of {type(model).__name__}")
        owner, left = child, left[1:]
    path = paths[id(owner)]
    if len(left) > 1:
        known = [name for name, _ in owner.named_children()]
        raise ValueError(
            f"methods: {text!r}: {_called(model, path)} has no submodule {left[0]!r}{did_you_mean(left[0], known)}"
        )
    name = left[0] if left else "forward"
    if not path and name == "forward":
        raise ValueError(f"methods: {text!r}: forward itself is always converted; leave it out")
    _check(model, owner, path, name, text)
    return MethodName(path, name)


def _check(model: nn.Module, owner: nn.Module, path: str, name: str, text: str) -> None:
    where = f"methods: {text!r}: {_called(model, path)}"
    found = inspect.getattr_static(owner, name, None)
    if name != "forward" and hasattr(nn.Module, name):
        raise ValueError(f"{where}: {name} is a method of every nn.Module: give one of the model's own")
    if found is None:
        known = [*_own_methods(owner), *(child for child, _ in owner.named_children())]
        raise ValueError(f"{where} has no method {name!r}{did_you_mean(name, known)}")
    for kind, words in ((staticmethod, "a static method"), (classmethod, "a class method"), (property, "a property")):
        if isinstance(found, kind):
            raise ValueError(
                f"{where}.{name} is {words}, which does not run on the module: "
                "name the method that calls it, or make it a method"
            )
    if not callable(found) or isinstance(found, type):
        raise ValueError(f"{where}.{name} is no method but an object ({type(found).__name__})")
    for kind, why in ((GraphModule, "a GraphModule, whose class fx writes to"), (ScriptModule, "a TorchScript module")):
        if path and isinstance(owner, kind):
            raise ConversionError(f"{where} is {why}: name a method of the model that calls it")


def _own_methods(owner: nn.Module) -> Iterator[str]:
    """Yield the names of what the user's classes define, and could be named."""
    for cls in type(owner).__mro__:
        if not cls.__module__.startswith("torch."):
            yield from (name for name, value in vars(cls).items() if inspect.isfunction(value) and name[:2] != "__")


def _called(model: nn.Module, path: str) -> str:
    return f"{type(model).__name__}.{path}" if path else type(model).__name__
