"""The statically captured graphs of one method: which of them serves a call, and when another one is traced."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import attrgetter, getitem, not_
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.overrides import get_overridable_functions

from fxprec.capture.call_key import Key
from fxprec.capture.capturing import CaptureDeclined
from fxprec.capture.symbolic.trace import StaticCapture, propagate_shapes, trace_static
from fxprec.model.captured import Captured
from fxprec.passes.fuse import largest_left, wants_sizes
from fxprec.passes.fusion.regions import grows_to
from fxprec.passes.graph.annotations import notes
from fxprec.programs.memory import SharedMemory, constants_of, mark_shared
from fxprec.shadows import ShadowStore

#: Input dtypes for which a graph that was captured without inputs is right: casts in it look at what arrives.
_ASSUMED: Final = frozenset({torch.float32, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool})

#: Integer dtypes with values that no low dtype holds. A graph that was captured with such an input keeps in FP32 what
#: is computed from it; one that was captured without inputs took the input for a float.
_COUNTS: Final = frozenset({torch.int64, torch.int32, torch.int16})

#: Graphs for the same tensor arguments, before dynamo takes over: a number that changes with every call (a step, a
#: temperature) is a constant of a static graph, and an input of dynamo's.
_MOST_BEFORE_DYNAMO: Final = 8
#: With capture="symbolic", where dynamo may not: the oldest graph makes room.
_MOST_SYMBOLIC: Final = 64

#: Where tensors are read from at each call: the dicts of their modules, and their names there.
_Places = tuple[tuple[Mapping[str, Any], ...], tuple[str, ...]]


#: Of a tensor what promotion goes by, its dtype and whether it has no dimension; and its layout.
_Kind = tuple[torch.dtype, bool, torch.layout]

_dtype_of, _layout_of = attrgetter("dtype"), attrgetter("layout")


class OtherDtypes(Exception):
    """A weight has another dtype than at capture, or a dimension where it had none; nothing ran."""


@dataclass(frozen=True, slots=True, eq=False)
class StaticEntry:
    """Graph that is ready to run: guards, program, and where its weights are read from at each call.

    Reading by (dict, key) makes functional_call, parametrizations and replaced tensors count.

    Attributes:
        low, plain: where the program's weights are.
        low_dtypes, plain_dtypes: which they had at capture.
        kinds: dtype, layout and whether it is 0-dim, of each input that it was rewritten for; None: FP32 was assumed.
        assumed_float: of each input whether the graph took it for a float: integers that count (``_COUNTS``) must not
            use it.
        may_share: weights that may share memory with what the graph writes.
        memory: how they and the inputs share memory; None: the graph writes to none of them.
        small_up_to: regions too small to pay were left to torch's ops. Of each input the number of elements beyond
            which they would pay, so that another trace is due; None: none was left out for its size.
        wants_sizes: it was captured without sizes, and has regions that may be too small to pay. So it serves no call
            with tensors: that is traced anew, with its sizes.
        one_element_dims: index in ``plain`` of each tensor of one element -> its ``dim()``: torch promotes a 0-dim
            tensor otherwise than one of shape [1].
    """

    captured: Captured
    low: _Places
    plain: _Places
    low_dtypes: list[torch.dtype]
    plain_dtypes: list[torch.dtype]
    kinds: list[_Kind] | None
    assumed_float: tuple[bool, ...]
    may_share: _Places
    memory: SharedMemory | None
    small_up_to: tuple[int, ...] | None
    wants_sizes: bool
    one_element_dims: Mapping[int, int]

    @classmethod
    def of(cls, capture: StaticCapture, captured: Captured, tensors: tuple[Tensor, ...] | None) -> StaticEntry:
        """Return the entry of a trace and of what became of it; ``tensors`` as for ``StaticGraphs.trace``."""
        kinds = None if tensors is None else [(x.dtype, not x.dim(), x.layout) for x in tensors]
        program, owners = captured.program, capture.owners
        low, plain = _places(owners, program.low), _places(owners, program.plain)
        watched = _places(owners, (*program.low, *program.watched))
        # Only a program that writes can be wrong for tensors that share memory otherwise.
        memory = None
        if program.writes:
            memory = SharedMemory([*map(getitem, *watched)], constants_of(program.gm), tensors)
        low_dtypes, plain_dtypes = ([tensor.dtype for tensor in map(getitem, *places)] for places in (low, plain))
        # Small regions were left to torch's ops; beyond these sizes a graph with them is worth a trace.
        left, most = largest_left(captured.gm), None
        if left is not None and tensors is not None:
            most = tuple(grows_to(tensor.numel(), left) for tensor in tensors)
        placeholders = captured.gm.graph.find_nodes(op="placeholder")
        return cls(
            captured=captured,
            low=low,
            plain=plain,
            low_dtypes=low_dtypes,
            plain_dtypes=plain_dtypes,
            kinds=kinds,
            assumed_float=tuple(notes(node).taken_for_float for node in placeholders),
            may_share=watched,
            memory=memory,
            small_up_to=most,
            wants_sizes=tensors is None and wants_sizes(captured.gm),
            one_element_dims={i: each.dim() for i, each in enumerate(map(getitem, *plain)) if each.numel() == 1},
        )

    def is_outgrown(self, tensors: tuple[Tensor, ...]) -> bool:
        """Return whether inputs are so large now that the regions which were left out pay."""
        return self.small_up_to is not None and any(
            x.numel() > most for x, most in zip(tensors, self.small_up_to, strict=True)
        )

    def replaces(self, other: StaticEntry) -> bool:
        """Return whether the other graph of the key is never better: it was made without sizes, or lacks regions."""
        if other.captured.training != self.captured.training:
            return False
        return other.wants_sizes or (
            other.small_up_to is not None and self.small_up_to is None and other.kinds == self.kinds
        )

    def serves(self, tensors: tuple[Tensor, ...] | None) -> bool:
        """Return whether the graph is right for a call on these tensors, and no other would be faster.

        Asked in this order, the cheap before the dear: sizes as its regions want them, grad mode, dtypes of the inputs,
        what tracing read of Python's state (``Guards``), and shared memory, of a graph that writes.
        """
        if tensors is not None:
            if self.wants_sizes or (self.small_up_to is not None and self.is_outgrown(tensors)):
                return False
            if torch.is_grad_enabled() and not self.captured.gradients:  # what is returned would have none
                return False
            # By loops in C, and in place: every call comes here.
            numbers = map(not_, map(Tensor.dim, tensors))
            kinds = [*zip(map(_dtype_of, tensors), numbers, map(_layout_of, tensors), strict=True)]
            if self.kinds is not None:
                if self.kinds != kinds:
                    return False
            else:
                for (dtype, is_number, layout), taken_for_float in zip(kinds, self.assumed_float, strict=True):
                    if dtype not in _ASSUMED or is_number or layout is not torch.strided:
                        return False
                    if taken_for_float and dtype in _COUNTS:
                        return False
        if not self.captured.guards.hold():  # type: ignore[union-attr]
            return False
        # The guards know now that every weight is in its place.
        return tensors is None or self.memory is None or self.memory.holds([*map(getitem, *self.may_share)], tensors)

    def run(self, store: ShadowStore, tensors: tuple[Tensor, ...]) -> Any:
        """Run the program on the weights as they are now.

        Raises:
            OtherDtypes: these are others than the graph was rewritten for (``model.double()``).
        """
        # Dtypes decide promotion. Those of plain weights are compared at each call; of the low ones the store reads the
        # originals, and looks closely only where something changed.
        plain = [*map(getitem, *self.plain)]
        if [*map(_dtype_of, plain)] != self.plain_dtypes:
            raise OtherDtypes
        for place, dimensions in self.one_element_dims.items():
            if plain[place].dim() != dimensions:
                raise OtherDtypes
        given = [*map(getitem, *self.low)]
        looked = store.looked
        low = store.read(given)
        # A weight of another dtype is in other memory, which the store looks at closely.
        if looked != store.looked and [*map(_dtype_of, given)] != self.low_dtypes:
            raise OtherDtypes
        program = self.captured.program
        try:
            return program.function(*low, *plain, *tensors)
        finally:
            if program.writes_weights:
                store.mark_stale()


class StaticGraphs:
    """The static graphs of one method by argument pattern, the latest that served first.

    Who adds or removes a graph here does so in ``CapturedGraphs`` too, which lists those of all methods.

    Attributes:
        allowed: False once the model was found to be one that dynamo must take.
    """

    def __init__(self, capture: str) -> None:
        self._symbolic = capture == "symbolic"
        self.allowed = capture != "dynamo"
        self._entries: dict[Key, list[StaticEntry]] = {}

    def find(self, key: Key, tensors: tuple[Tensor, ...] | None) -> tuple[StaticEntry | None, bool]:
        """Return the graph that serves a call, if there is one, and whether another one served the last such call."""
        known = self._entries.get(key, [])
        for place, entry in enumerate(known):
            if entry.serves(tensors):
                # The next calls are mostly like this one.
                if place:
                    known.insert(0, known.pop(place))
                return entry, place > 0
        return None, False

    def outgrown(self, key: Key, tensors: tuple[Tensor, ...] | None) -> bool:
        """Return whether a graph for such calls was for smaller inputs: the next one has all its regions."""
        return tensors is not None and any(entry.is_outgrown(tensors) for entry in self._entries.get(key, ()))

    def trace(
        self,
        traced: nn.Module,
        key: Key,
        tensors: tuple[Tensor, ...] | None,
        method: Callable[..., Any],
        path: str,
    ) -> StaticCapture:
        """Trace for a call that no graph serves.

        Args:
            traced: the original module.
            key: of the call.
            tensors: the tensors of the call; None where there is no call yet.
            method: what runs, bound to the module that has it.
            path: of that module in ``traced``.

        Raises:
            CaptureDeclined: there can be no graph; nothing was run.
        """
        # An argument that changes with every call is a constant of each graph: dynamo makes it an input.
        names, constants = key
        known = self._of_names(names)
        if len(known) >= _MOST_BEFORE_DYNAMO and not self._symbolic:
            raise CaptureDeclined(f"{len(known)} graphs, and again {self._what_changed(key)}")
        # torch keeps the list of these from its first call on: made within a trace, it would hold what that patches.
        get_overridable_functions()
        capture = trace_static(traced, names, dict(constants), method, path)
        if tensors is not None:
            propagate_shapes(capture.gm, tensors)
        inputs = capture.gm.graph.find_nodes(op="placeholder")
        mark_shared(capture.gm, dict(zip(inputs, tensors or (), strict=False)))
        return capture

    def add(self, entry: StaticEntry) -> list[Captured]:
        """Serve its calls by this graph from now on. Return the graphs that made room for it, or that it replaces."""
        key: Any = entry.captured.key
        known = self._of_names(key[0])
        dropped = self.retire(known[0]) if len(known) >= _MOST_SYMBOLIC else []
        for other in [each for each in self._entries.get(key, ()) if entry.replaces(each)]:
            dropped += self.retire(other)
        self._entries.setdefault(key, []).insert(0, entry)
        return dropped

    def retire(self, entry: StaticEntry) -> list[Captured]:
        """Serve no call by it any more. Return its graph."""
        key: Any = entry.captured.key
        left = [other for other in self._entries.get(key, ()) if other is not entry]
        if left:
            self._entries[key] = left
        else:
            self._entries.pop(key, None)
        return [entry.captured]

    def forget(self, captured: Captured) -> list[Captured]:
        """Serve no call by this graph any more, if it is one of these. Return it."""
        return [gone for entry in self._all() if entry.captured is captured for gone in self.retire(entry)]

    def give_up(self) -> list[Captured]:
        """Leave all calls to dynamo from now on. Returns the graphs that no call reaches any more."""
        if self._symbolic:
            return []
        dropped = [entry.captured for entry in self._all()]
        self.allowed = False
        self._entries.clear()
        return dropped

    def _all(self) -> list[StaticEntry]:
        return [entry for entries in self._entries.values() for entry in entries]

    def _of_names(self, names: tuple[str, ...]) -> list[StaticEntry]:
        return [entry for (of, _), entries in self._entries.items() if of == names for entry in entries]

    def _what_changed(self, key: Key) -> str:
        """Say what made a further trace necessary, for the report."""
        names, _ = key
        values = [dict(others) for of, others in (*self._entries, key) if of == names]
        # The argument to name is one that had another value in more than half of the graphs.
        changing = [
            name for name in values[0] if len({repr(value.get(name)) for value in values}) > _MOST_BEFORE_DYNAMO // 2
        ]
        if changing:
            return f"another value of the argument '{changing[0]}'"
        failing = [entry.captured.guards.failing() for entry in self._entries.get(key, ())]  # type: ignore[union-attr]
        return next((why for why in failing if why), f"other dtypes of {', '.join(names)}")


def _places(owners: Mapping[str, Mapping[str, Any]], targets: tuple[str, ...]) -> _Places:
    """Return for each target where it lives: the dict of its module, and its name there."""
    return tuple([owners[target] for target in targets]), tuple([target.rpartition(".")[2] for target in targets])
