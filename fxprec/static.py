"""The statically captured graphs of one model: which of them serves a call, and when another one is traced."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from operator import getitem
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn
from torch.overrides import get_overridable_functions
from torch.utils._python_dispatch import _disable_current_modes

from fxprec.capture.collection import fewer_collections
from fxprec.capture.trace import CaptureDeclined, StaticCapture, call_key, default_key, trace_static
from fxprec.locks import CAPTURING
from fxprec.program import Program
from fxprec.shapes import propagate_shapes

if TYPE_CHECKING:
    from fxprec.conversion import Conversion

__all__ = ["StaticEntry", "StaticGraphs"]

#: Input dtypes for which a graph captured without inputs is right as it stands: its run-time tests tell them apart.
_ASSUMED: Final = frozenset({torch.float32, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool})

#: Graphs for the same tensor arguments, before dynamo takes over: a number that changes with every call (a step, a
#: temperature) is a constant of a static graph, and an input of dynamo's.
_ENOUGH: Final = 8
#: With capture="symbolic", where dynamo may not: the oldest graph makes room.
_MOST: Final = 64


@dataclass(frozen=True, slots=True, eq=False)
class StaticEntry:
    """One graph, ready to run: guards, program, and where its weights are read from at each call.

    Reading by (dict, key) makes functional_call, parametrizations and replaced tensors count. ``dtypes``: the input
    dtypes it was rewritten for; None: FP32 floats were assumed.
    """

    capture: StaticCapture
    program: Program
    low: tuple[tuple[Mapping[str, Any], ...], tuple[str, ...]]
    plain: tuple[tuple[Mapping[str, Any], ...], tuple[str, ...]]
    dtypes: tuple[torch.dtype, ...] | None

    def serves(self, tensors: tuple[Tensor, ...] | None) -> bool:
        """Whether these inputs have the dtypes that the graph was rewritten for, and what tracing read still holds."""
        if tensors is not None:
            if self.dtypes is None:
                for tensor in tensors:
                    if tensor.dtype not in _ASSUMED or not tensor.dim():
                        return False
            elif self.dtypes != tuple([tensor.dtype for tensor in tensors]):
                return False
        return self.capture.guards.failing() is None


class StaticGraphs:
    """Static capture for one conversion.

    Attributes:
        allowed: False once the model was found to be one that dynamo must take.
    """

    def __init__(self, conversion: Conversion) -> None:
        self._conversion = conversion
        self._symbolic = conversion.settings.capture == "symbolic"
        self.allowed = conversion.settings.capture != "dynamo"
        self._entries: dict[tuple[str, ...], dict[Any, list[StaticEntry]]] = {}

    def run(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the graph for this call.

        Raises:
            CaptureDeclined: there can be none; nothing was run.
        """
        conversion = self._conversion
        names, constants, tensors = call_key(conversion.signature, args, kwargs)
        entry = self._entry(module, names, constants, tensors)
        low = conversion.weights.read([*map(getitem, *entry.low)])
        device = conversion.settings.device
        enabled = torch.is_autocast_enabled(device)
        torch.set_autocast_enabled(device, False)
        try:
            return entry.program.function(*low, *map(getitem, *entry.plain), *tensors)
        finally:
            torch.set_autocast_enabled(device, enabled)

    def capture_default(self, module: nn.Module) -> None:
        """Capture for the call that one expects without having seen one.

        Raises:
            CaptureDeclined: it takes a call, or dynamo.
        """
        names, constants = default_key(self._conversion.signature)
        self._entry(module, names, constants, None)

    def _entry(
        self, module: nn.Module, names: tuple[str, ...], constants: Any, tensors: tuple[Tensor, ...] | None
    ) -> StaticEntry:
        of_names = self._entries.get(names)
        if of_names is not None:
            for entry in of_names.get(constants, ()):
                if entry.serves(tensors):
                    return entry
        with CAPTURING, _disable_current_modes(), fewer_collections():
            return self._trace(module, names, constants, tensors)

    def _trace(
        self, module: nn.Module, names: tuple[str, ...], constants: Any, tensors: tuple[Tensor, ...] | None
    ) -> StaticEntry:
        conversion = self._conversion
        of_names = self._entries.setdefault(names, {})
        known = [entry for entries in of_names.values() for entry in entries]
        try:
            if len(known) >= _ENOUGH and not self._symbolic:
                raise CaptureDeclined(f"{len(known)} graphs, and again {_what_changed(of_names, names, constants)}")
            get_overridable_functions()  # torch caches them for good: not while they are patched for a trace
            with conversion.twin(module) as twin:
                capture = trace_static(twin, names, dict(constants))
        except CaptureDeclined as reason:
            conversion.declined.append(reason.reason)
            if not self._symbolic:
                self._give_up()
            raise
        if tensors is not None:
            propagate_shapes(capture.gm, tensors)
        if len(known) >= _MOST:
            self._forget(of_names, known[0])
        program = conversion.rewrite(capture.gm)
        conversion.captures += 1
        dtypes = None if tensors is None else tuple(tensor.dtype for tensor in tensors)
        low, plain = _places(capture.owners, program.low), _places(capture.owners, program.plain)
        entry = StaticEntry(capture, program, low, plain, dtypes)
        of_names.setdefault(constants, []).insert(0, entry)
        return entry

    def _give_up(self) -> None:
        """From now on dynamo serves; graphs that no call reaches any more must not stay."""
        self.allowed = False
        for of_names in self._entries.values():
            for entry in [entry for entries in of_names.values() for entry in entries]:
                self._forget(of_names, entry)

    def _forget(self, of_names: dict[Any, list[StaticEntry]], entry: StaticEntry) -> None:
        for constants, entries in [*of_names.items()]:
            of_names[constants] = [other for other in entries if other is not entry]
            if not of_names[constants]:
                del of_names[constants]
        self._conversion.forget(entry.program)


def _what_changed(of_names: dict[Any, list[StaticEntry]], names: tuple[str, ...], constants: Any) -> str:
    """What made a further trace necessary, for the report."""
    values = [dict(key) for key in (*of_names, constants)]
    changing = [name for name in values[0] if len({repr(value.get(name)) for value in values}) > _ENOUGH // 2]
    if changing:
        return f"another value of the argument '{changing[0]}'"
    failing = [entry.capture.guards.failing() for entry in of_names.get(constants, ())]
    return next((why for why in failing if why), f"other dtypes of {', '.join(names)}")


def _places(
    owners: Mapping[str, Mapping[str, Any]], targets: tuple[str, ...]
) -> tuple[tuple[Mapping[str, Any], ...], tuple[str, ...]]:
    """For each target where it lives: the dict of its module, and its name there."""
    return tuple([owners[target] for target in targets]), tuple([target.rpartition(".")[2] for target in targets])
