"""Watch what a forward reads of its modules while it is traced: the material of the guards.

``nn.Module`` gets a ``__getattribute__`` for the time of the trace. Reading what a guard cannot hold (a config object)
declines the trace, and so does the first look at a module that static capture leaves to dynamo.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from operator import attrgetter
from types import FunctionType, MethodType
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fxprec.capture.capturing import CaptureDeclined
from fxprec.capture.facts import PARTS, remembered
from fxprec.capture.originals import original_class
from fxprec.capture.symbolic.guards import HOOKS, Asked, Guards, Reads, Slot, hooks_of
from fxprec.capture.symbolic.opaque_code import OpaqueCode
from fxprec.capture.symbolic.surroundings import Surroundings
from fxprec.capture.user_code import is_trusted
from fxprec.torch_internals import CALLED_THROUGH

_TENSORS: Final = {"_parameters", "_buffers"}
_STANDARD: Final = frozenset(vars(nn.Module()))
#: Attributes that are not recorded: nn.Module's own machinery, or guarded for every module in any case.
_INTERNAL: Final = frozenset(dir(nn.Module())) - {"training", *PARTS}
_METHODS: Final = _INTERNAL - _STANDARD - {CALLED_THROUGH}
_SHAPE: Final = attrgetter("shape")
_ATTRIBUTES_OF_TENSORS: Final = attrgetter("shape", "dtype", "device", "requires_grad")
_MISSING: Final = object()

#: Classes of torch, by name (most are imported only when used), and why static capture leaves them to dynamo.
_UNFIT: Final = {
    "RNNBase": "a recurrent layer (its kernel takes flattened weights)",
    "RNNCellBase": "a recurrent cell (it looks at the rank of its input)",
    "MultiheadAttention": "nn.MultiheadAttention (it chooses a path by its inputs)",
    "Transformer": "nn.Transformer (it chooses a path by its inputs)",
    "TransformerEncoder": "nn.TransformerEncoder (it chooses a path by its inputs)",
    "TransformerEncoderLayer": "nn.TransformerEncoderLayer (it chooses a path by its inputs)",
    "TransformerDecoder": "nn.TransformerDecoder (it chooses a path by its inputs)",
    "TransformerDecoderLayer": "nn.TransformerDecoderLayer (it chooses a path by its inputs)",
    "ScriptModule": "a TorchScript module",
    "OptimizedModule": "a torch.compile'd module",
    "LazyModuleMixin": "a lazy module",
    "DataParallel": "wrapped in DataParallel",
    "DistributedDataParallel": "wrapped in DistributedDataParallel",
    "FullyShardedDataParallel": "managed by FSDP",
    "FSDPModule": "managed by FSDP",
}


def unfit(module: nn.Module) -> str | None:
    """Return why a module, whatever its forward does, is left to dynamo, as "is a lazy module"; None if it is not."""
    return _unfit_class(type(module)) or _unfit_object(_attributes(module))


def _unfit_class(cls: type[nn.Module]) -> str | None:
    for base in cls.__mro__:
        if base.__name__ in _UNFIT and base.__module__.startswith("torch."):
            return f"is {_UNFIT[base.__name__]}"
    if cls.__call__ is not nn.Module.__call__ and not issubclass(cls, torch.fx.GraphModule):
        return "has a __call__ of its own"
    if cls.__getattribute__ is not nn.Module.__getattribute__:
        return "has a __getattribute__ of its own"
    return "has a __torch_function__" if hasattr(cls, "__torch_function__") else None


def _unfit_object(attributes: dict[str, Any]) -> str | None:
    if attributes.get(CALLED_THROUGH) is not None:
        return "is compiled (module.compile())"
    for part in _TENSORS & attributes.keys():
        for tensor in attributes[part].values():
            if is_lazy(tensor):
                return "has uninitialized parameters"
    return None


def _attributes(module: nn.Module) -> dict[str, Any]:
    """Return ``vars(module)``, without recording a read of it."""
    return object.__getattribute__(module, "__dict__")


class Recorder:
    """Collects the reads of one trace, in this thread.

    Args:
        root: the traced module.
        decline: called with a reason; raises.

    Attributes:
        slots: kind ("parameter" or "buffer") and place of every tensor, by its id; of tied ones, the first.
        surroundings: what was read outside of the modules.
        opaque: stops the trace before it executes what no graph can hold.
    """

    def __init__(self, root: nn.Module, decline: Callable[[str], Any]) -> None:
        self._root = root
        self._decline = decline
        self._paths: dict[int, str] = {}
        self._classes: dict[type[nn.Module], None] = {}
        self._reads: dict[int, Reads] = {}
        self._seen: set[tuple[int, str]] = set()
        self.opaque = OpaqueCode(decline)
        self.surroundings = Surroundings(self.opaque.stop_at, self.opaque.before_call)
        self._asked: dict[tuple[str, Any], Asked] = {}
        self.slots: dict[int, tuple[str, Slot]] = {}
        self._ties: list[tuple[Slot, Slot]] = []
        swapped: dict[type[nn.Module], None] = {}
        # Everything that the trace may meet is known by its id before it begins.
        for path, module in root.named_modules():
            self._paths[id(module)] = path
            self._classes[original_class(module)] = swapped[type(module)] = None
            attributes = _attributes(module)
            if not attributes.keys() >= _TENSORS:  # a traced module of TorchScript's
                why = _unfit_class(type(module)) or "keeps its parameters elsewhere"
                raise CaptureDeclined(f"submodule '{path}' {why}" if path else f"the model {why}")
            # Of tensors that stand in two slots the first is read, and the other must stay the same one.
            for kind, slots in (("parameter", attributes["_parameters"]), ("buffer", attributes["_buffers"])):
                for name, tensor in slots.items():
                    if tensor is None:
                        continue
                    slot = Slot(slots, name, f"{path}.{name}" if path else name)
                    if id(tensor) in self.slots:
                        self._ties.append((slot, self.slots[id(tensor)][1]))
                    else:
                        self.slots[id(tensor)] = (kind, slot)
        # What a forward writes to a class (``type(self).calls += 1``) is put back: the user's, or a converted model's.
        for cls in self._classes | swapped:
            if not is_trusted(cls):
                self.surroundings.contents.add(cls)

    def getattribute(self) -> Callable[[nn.Module, str], Any]:
        """Make the method that takes the place of ``nn.Module.__getattribute__``, which is object's, in a trace."""
        get, thread, tracing = object.__getattribute__, threading.get_ident, threading.get_ident()
        all_reads, seen = self._reads, self._seen

        def __getattribute__(module: nn.Module, name: str) -> Any:
            if name in _INTERNAL or thread() != tracing:
                return get(module, name)
            reads = all_reads.get(id(module)) or self._first_read(module)
            if (id(module), name) in seen:
                return get(module, name)
            # Each attribute is looked at once a trace; the next reads cost two look-ups.
            self._about_to_read(reads, name)
            try:
                value = get(module, name)
            except AttributeError:
                attributes = get(module, "__dict__")
                weights, buffers, modules = attributes["_parameters"], attributes["_buffers"], attributes["_modules"]
                if name not in weights and name not in buffers and name not in modules:
                    reads.absent.add(name)
                raise
            seen.add((id(module), name))
            self._read(reads, name, value)
            return value

        return __getattribute__

    def called(self, module: nn.Module) -> None:
        """Note a call of a submodule: its hooks would run."""
        reads = self._reads.get(id(module)) or self._first_read(module)
        if not reads.called:
            attributes = _attributes(module)
            if any(hooks_of(attributes)):
                name = next(name for name in HOOKS if attributes[name])
                self._decline(f"submodule '{reads.path}' has hooks ({name})")
            reads.called = True
            self.traces(attributes.get("forward", original_class(module).forward))

    def traces(self, function: Any) -> None:
        """Look through a function whose code will be traced: what it reads is guarded."""
        if isinstance(function, MethodType) and isinstance(function.__self__, nn.Module):
            function = function.__func__
        if isinstance(function, FunctionType | MethodType) and (why := self.surroundings.look_at(function)) is not None:
            self._decline(f"calls {why}")

    def traces_method(self, module: nn.Module, name: str) -> None:
        """Look through a method of a class: its code will be traced, and the class must keep it."""
        if (why := self.surroundings.look_at_attribute(original_class(module), name)) is not None:
            self._decline(f"reads {why}")

    def asks_shape(self, tensor: Tensor) -> None:
        """Note that the forward used the shape of this parameter or buffer as a constant."""
        self._add_asked(self.slots[id(tensor)][1], _SHAPE)

    def asks_missing(self, tensor: Tensor, name: str) -> None:
        """Note that the forward asked this parameter or buffer for an attribute that nobody set on it."""
        slot = self.slots[id(tensor)][1]
        self._asked[slot.path, name] = (slot, lambda asked: name in vars(asked), False)

    def _add_asked(self, slot: Slot, ask: Callable[[Tensor], Any]) -> None:
        if slot.tensor() is not None:
            self._asked[slot.path, ask] = (slot, ask, ask(slot.tensor()))

    def guards(self) -> Guards:
        """Return the guards of everything read so far."""
        found = self.surroundings
        # ``type(module)`` is no read of an attribute, and nothing tells of it: the classes of all modules are guarded.
        if (why := found.guard_model_classes(self._classes)) is not None:
            self._decline(f"asks for types, and may read {why}")
        # Tensors outside of the model are constants: their shapes may have been read.
        for label, tensor in found.tensors.values():
            self._add_asked(Slot({"": tensor}, "", label), _ATTRIBUTES_OF_TENSORS)
        return Guards(
            self._root,
            [*self._reads.values()],
            found.expected,
            found.functions,
            found.absent,
            self._ties,
            [*self._asked.values()],
        )

    def _first_read(self, module: nn.Module) -> Reads:
        path = self._paths.get(id(module), type(module).__name__)
        reads = self._reads[id(module)] = Reads(path, module)
        if (why := unfit(module)) is not None:
            self._decline(f"submodule '{path}' {why}" if module is not self._root else f"the model {why}")
        # Code of the user's that runs whenever an attribute is missing.
        if original_class(module).__getattr__ is not nn.Module.__getattr__:
            self.traces_method(module, "__getattr__")
        attributes = _attributes(module)
        # Methods of nn.Module that somebody set on the instance are attributes like any other.
        if not _METHODS.isdisjoint(attributes):
            for name in _METHODS.intersection(attributes):
                if module is not self._root or name != "forward":
                    self._read(reads, name, attributes[name])
        if "forward" not in attributes and module is not self._root:
            reads.of_class.add("forward")
        return reads

    def _about_to_read(self, reads: Reads, name: str) -> None:
        """Look through the code of a property or another descriptor before it runs."""
        raw = _raw(original_class(reads.module), name)
        if isinstance(raw, property | functools.cached_property):
            self.traces_method(reads.module, name)
        elif hasattr(raw, "__get__") and name not in _attributes(reads.module) and not is_trusted(type(raw)):
            self._decline(f"the forward reads {reads.label(name)} through a descriptor ({type(raw).__name__})")

    def _read(self, reads: Reads, name: str, value: Any) -> None:
        attributes = _attributes(reads.module)
        if name in PARTS:
            reads.walked.add(name)
        if name in _TENSORS:
            # The forward gets the real tensors (``next(self.parameters()).device``). It may read what takes no
            # arithmetic, so that is guarded of all of them.
            for tensor_name in value:
                self._add_asked(Slot(value, tensor_name, reads.label(tensor_name)), _ATTRIBUTES_OF_TENSORS)
            return
        if name == "_modules" or (name.startswith("__") and name.endswith("__")):
            return
        if name in attributes:
            if isinstance(value, Tensor):
                reads.tensors[name] = value
                self._add_asked(Slot(attributes, name, reads.label(name)), _ATTRIBUTES_OF_TENSORS)
            elif value is attributes[name]:
                self._look_at(reads, name, value)
                reads.values[name] = remembered(value)
            return
        if name == "_wrapped_call" and isinstance(reads.module, torch.fx.GraphModule):
            return
        # Found on the class: the instance must not hide it, and its code is read.
        if _raw(original_class(reads.module), name) is not _MISSING:
            reads.of_class.add(name)
            self.traces_method(reads.module, name)

    def _look_at(self, reads: Reads, name: str, value: Any) -> None:
        if isinstance(value, MethodType) and isinstance(value.__self__, nn.Module):
            value = value.__func__
        if (why := self.surroundings.look_at(value, reads.label(name))) is not None:
            self._decline(f"the forward reads {reads.label(name)}, {why}")


def _raw(cls: type, name: str) -> Any:
    """Return what a class has under this name, before a descriptor binds it."""
    return next((vars(base)[name] for base in cls.__mro__ if name in vars(base)), _MISSING)
