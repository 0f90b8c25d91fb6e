"""Record every op that runs, and run it a second time in the dtype of the reference.

Views are no ops here, nor are views in place (``transpose_``): they move nothing (see ``memory``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor, nn

from fxprec.inspection.nodes import NamedNode, short_paths, source_line
from fxprec.inspection.prices import Size
from fxprec.inspection.text import as_json
from fxprec.model.conversion import conversion_of
from fxprec.passes.graph.annotations import nested
from fxprec.tape.attribution import Attribution, observe, written_by
from fxprec.tape.memory import Memory, TensorPlace
from fxprec.tape.operation import Operation, OpOrigin, full_fp32, is_place
from fxprec.torch_internals import (
    aten_foreach_copy_,
    aten_to_copy,
    storage_key,
    tree_flatten,
    tree_leaves,
    tree_map_only,
)

_copy_: Final = torch.ops.aten.copy_.default
#: After these a storage is another.
_RESIZES: Final = frozenset(
    getattr(packet, name)
    for packet in (torch.ops.aten.resize_, torch.ops.aten.resize_as_, torch.ops.aten.set_)
    for name in packet.overloads()
)


@dataclass(frozen=True, slots=True)
class Decision:
    """Number that Python read of a tensor (``item()``, ``bool()``, ``torch.equal``), where the reference has another.

    Attributes:
        source: the line that read it, ``model.py:12``.
        low: what the run has.
        reference: what the reference has, of the same ops.
    """

    source: str
    low: bool | float
    reference: bool | float

    def to_dict(self) -> dict[str, Any]:
        """Return it for JSON: a number that is not finite is None."""
        return as_json(self)

    def __str__(self) -> str:
        low, reference = self.low, self.reference
        digits = next((n for n in range(4, 17) if f"{low:.{n}g}" != f"{reference:.{n}g}"), 17)
        texts = (str(each) if isinstance(each, bool) else f"{each:.{digits}g}" for each in (low, reference))
        return f"Python read {next(texts)} at {self.source}, and {next(texts)} in the reference"


class OpRecorder(Attribution):
    """Dispatch mode that records what runs in this thread, as operations in the order of running.

    Args:
        reference: the dtype of the reference, in which each op runs a second time, beside the run.
        model: converted, whose shadows may be written again before they are read; None: no model runs.
        rounded: a low dtype: the walk backwards shall tell what each input of a node would add to the error if the
            node alone read it rounded to that. None: nobody asks.
        decides: Python reads the reference's numbers, and goes its way: the reference is then the model in its dtype,
            and the run is another one.

    Attributes:
        memory: what they read and wrote, in both.
        operations: all that made or changed memory.
        skipped: names of ops on what is no plain memory (sparse tensors), or that give memory another size: what they
            give is taken for exact.
        overflown: names of ops that gave inf or nan where the reference has a number, as for a mask of -1e9 in float16.
        decisions: numbers that Python read, and that the reference has otherwise.
        outgrown: names of ops whose shapes depend on values, and would be others in the reference: it keeps the run's.
        sizes: (position of the graph, name of a node) -> the size of what it gave.
    """

    def __init__(
        self, reference: torch.dtype, model: nn.Module | None = None, rounded: torch.dtype | None = None,
        decides: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.memory = Memory(reference)
        self.rounded, self.decides = rounded, decides
        self.decisions: list[Decision] = []
        self._handed: list[dict[int, dict[TensorPlace, int]]] = []  # a running node: storage -> its inputs there
        self.operations: list[Operation] = []
        self.skipped: set[str] = set()
        self.outgrown: set[str] = set()
        self.overflown: set[str] = set()
        self.sizes: dict[tuple[int, str], Any] = {}
        self._masters = {} if model is None else dict(model.named_parameters(remove_duplicate=False))
        shadows = [] if model is None else conversion_of(model).store.shadows_of([*self._masters.values()])
        self._old_shadows = {storage_key(shadow) for shadow in shadows if shadow is not None}
        self._unread: dict[int, tuple[str, Tensor, Tensor]] = {}  # storage -> path of a weight, weight, its shadow

    def begin(self, shadows: Mapping[str, Tensor]) -> None:
        """Attribute the low copies of weights to the weights, also where they were made before this run."""
        # The program's own order of weights tells which shadow belongs to which.
        keys = {storage_key(shadow): (path, self._masters[path], shadow) for path, shadow in shadows.items()}
        made = {key for key in keys if not self.memory.knows(keys[key][2])}
        # A shadow that was just written was recorded as an op outside of the graphs: now it is known whose it is.
        for number, operation in reversed([*enumerate(self.operations)]):
            key = operation.outputs[0].storage
            if key in keys and operation.origin.kind == "outside":
                if operation.fresh:
                    del self.operations[number]
                    self.memory.forget(operation.outputs[0])
                    made.add(key)
                else:
                    self.operations[number] = replace(operation, origin=OpOrigin("weight", keys[key][0]))
        self._unread |= {key: keys[key] for key in made}

    def look(self, node: NamedNode, run: Callable[[], Any]) -> Any:
        # By storage, since a node's ops may read views of what it was handed.
        handed: dict[int, dict[TensorPlace, int]] = {}
        for position, value in enumerate(node.inputs if self.rounded is not None else ()):
            if isinstance(value, Tensor) and value.is_floating_point() and _is_plain(value):
                place = self.memory.place(value)
                handed.setdefault(place.storage, {}).setdefault(place, position)
        self._handed.append(handed)
        try:
            result = super().look(node, run)
        finally:
            self._handed.pop()
        self.sizes[node.graph, node.name] = nested(result, Size.of)
        return result

    def op(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], origin: OpOrigin) -> Any:
        """Run an op, record it, and run it in the reference."""
        if function is aten_foreach_copy_:
            for target, source in zip(args[0], args[1], strict=True):
                # Shadows that were there before are refreshed in place: that counts only for those that the run reads.
                if storage_key(target) in self._old_shadows and not self.memory.knows(target):
                    function([target], [source])  # ``begin`` notes it, once an op reads it
                else:
                    self._record(_copy_, (target, source), {}, origin)
            return None
        return self._record(function, args, kwargs, origin)

    def _record(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], origin: OpOrigin) -> Any:
        # Views in place move nothing, and a storage of another size can have no counterpart in the reference.
        if torch.Tag.inplace_view in function.tags and function not in _RESIZES:
            return function(*args, **kwargs)
        memory = self.memory
        leaves, spec = tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if not all(map(_is_plain, tensors)) or function in _RESIZES:
            self.skipped.add(function.name())
            for leaf in tensors if function in _RESIZES else ():
                memory.forget(memory.place(leaf))
            return function(*args, **kwargs)
        for leaf in tensors if self._unread else ():
            if (unread := self._unread.pop(storage_key(leaf), None)) is not None:
                path, weight, shadow = unread
                source, place = memory.place(weight.detach()), memory.place(shadow.detach())
                read, how = tree_flatten(((source,), {"dtype": shadow.dtype}), is_leaf=is_place)
                origin_of = OpOrigin("weight", path)
                self._add(Operation(aten_to_copy, tuple(read), how, (0,), (), (place,), (), origin_of), {})
        places = [memory.place(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        ids = written_by(function, args, kwargs)
        written = [number for number, leaf in enumerate(leaves) if id(leaf) in ids]
        # The walk backwards undoes writes: memory is then at each op as the op found it.
        before = tuple((memory.low(places[n]).clone(), memory.exact(places[n]).clone()) for n in written)
        for number in written:
            memory.prepare_write(places[number])
        # Integers have no memory of the reference's own as long as they are the same: what is written is kept aside.
        shared = {places[n].storage for n in written if not places[n].is_float}
        aside = {p: memory.exact(p).clone() for p in places if isinstance(p, TensorPlace) and p.storage in shared}
        output = function(*args, **kwargs)
        results = tree_leaves(output)
        # A result whose storage is known is a view, or what was written: no new memory.
        fresh = [
            number
            for number, result in enumerate(results)
            if isinstance(result, Tensor) and _is_plain(result) and not memory.knows(result)
        ]
        if not all(_is_plain(result) for result in results if isinstance(result, Tensor)):
            self.skipped.add(function.name())
        if fresh or written:
            outputs = (*(memory.place(results[n]) for n in fresh), *(places[n] for n in written))
            inputs = {} if origin.backward else self._inputs(places)
            made = Operation(
                function, tuple(places), spec, tuple(fresh), tuple(written), outputs, before, origin, inputs=inputs
            )
            self._add(made, aside)
        elif isinstance(output, bool | int | float):
            return self._read_by_python(function, args, kwargs, output, origin)
        return output

    def _read_by_python(
        self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], low: bool | float, origin: OpOrigin
    ) -> bool | float:
        """Return a number that Python gets of tensors; where the reference has another one, note that."""
        # The same function on the reference's values says what Python would have read there.
        exact = tree_map_only(Tensor, lambda x: self.memory.exact(self.memory.place(x)), (args, kwargs))
        reference = function(*exact[0], **exact[1])
        if reference != low and not (reference != reference and low != low):
            self.decisions.append(Decision(line_of(origin), low, reference))
        return reference if self.decides else low

    def _inputs(self, read: Sequence[Any]) -> dict[TensorPlace, int]:
        """Return the node's inputs that an op reads; a view of one begins at or behind its beginning."""
        found: dict[TensorPlace, int] = {}
        for place in read if self._handed and self._handed[-1] else ():
            known = self._handed[-1].get(place.storage, {}) if isinstance(place, TensorPlace) else {}
            if known:
                best = max(known, key=lambda own: (own == place, own.offset <= place.offset, own.offset))
                found[place] = known[best]
        return found

    def _add(self, operation: Operation, aside: Mapping[TensorPlace, Tensor]) -> None:
        """Run an operation in the reference, record it, and note whether the run alone gave inf or nan."""
        self._run_exact(operation, aside)
        for place in operation.outputs:
            # Told apart from a mask: there the reference is infinite as well.
            bad = ~self.memory.low(place).isfinite() if place.is_float else None
            if bad is not None and bool(bad.any()) and bool(self.memory.exact(place)[bad].isfinite().any()):
                self.overflown.add(operation.name)
        self.noted(operation)

    def noted(self, operation: Operation) -> None:
        """Look at an operation that was recorded, while memory is as it left it."""

    def _run_exact(self, operation: Operation, aside: Mapping[TensorPlace, Tensor]) -> None:
        """Run an operation in the reference; ``aside``: what stood in memory that the run has written meanwhile."""
        memory = self.memory

        def read(place: TensorPlace, written: bool) -> Tensor:
            value = aside[place] if place in aside else memory.exact(place)
            return value.clone() if written else value

        if operation.keeps_values and memory.share(operation.outputs[0], operation.leaves[0]):
            self.operations.append(operation)
            return
        with torch.no_grad(), full_fp32():
            # Draws of the run are the reference's as well: random numbers are nobody's error.
            values = [memory.low(place) for place in operation.outputs]
            if not operation.draws:
                try:
                    values = operation.run(read, memory.reference, operation.drawn(memory.low))
                except Exception as error:  # no kernel for the reference's dtype
                    why = (str(error).splitlines() or [type(error).__name__])[0]
                    operation = replace(operation, why_inexact=f"{operation.name} in {memory.reference}: {why}")
                    with contextlib.suppress(Exception):
                        values = operation.run(read, memory.reference)
            for number, (place, value) in enumerate(zip(operation.outputs, values, strict=True)):
                fresh = number < len(operation.fresh) and not operation.draws
                if value is not None and not memory.write_exact(place, value, fresh):
                    self.outgrown.add(operation.name)
        self.operations.append(operation)


def _is_plain(tensor: Tensor) -> bool:
    """Return whether a tensor lies in memory element by element."""
    return tensor.layout is torch.strided


def record(
    model: nn.Module, run: Callable[[], Any], reference: torch.dtype, opened: bool = False,
    rounded: torch.dtype | None = None, decides: bool = False,
) -> tuple[OpRecorder, Any] | None:  # fmt: skip
    """Run something on a converted model and record it; None where it is to be run once more.

    Args:
        model: converted.
        run: calls the model.
        reference: the dtype of the reference.
        opened: fused regions run op by op, and not as kernels.
        rounded, decides: as of ``OpRecorder``.
    """
    recorder = OpRecorder(reference, model, rounded, decides)
    result = observe(model, recorder, run, opened)
    return None if result is None else (recorder, *result)


def line_of(origin: OpOrigin) -> str:
    """Return the line of the user's code that an op belongs to, ``model.py:12``."""
    return short_paths(origin.source) if origin.node is None else source_line(origin.node)
