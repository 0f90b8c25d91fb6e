"""Write down every op that runs, as torch's dispatcher sees it: below autograd, above the kernels.

In the forward an op belongs to the node that is computed; in the backward to the node whose autograd function runs,
which torch's sequence numbers tell. Views are no ops here: they move nothing (see ``memory``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor, nn

from fxprec.capture.user_line import user_line
from fxprec.model.module import conversion_of
from fxprec.passes.torch_internals import schema_of
from fxprec.tape.memory import Memory, Place
from fxprec.tape.nodes import NodeOf, node_by_node
from fxprec.tape.operation import Operation
from fxprec.tape.origin import Origin
from fxprec.torch_internals import (
    TorchDispatchMode,
    aten_foreach_copy_,
    aten_to_copy,
    current_autograd_node,
    sequence_number,
    storage_key,
    tree_flatten,
    tree_leaves,
)

_PLAIN: Final = (Tensor, torch.nn.Parameter)
_copy_: Final = torch.ops.aten.copy_.default
#: After these a storage is another.
_RESIZES: Final = frozenset(
    getattr(packet, name)
    for packet in (torch.ops.aten.resize_, torch.ops.aten.resize_as_, torch.ops.aten.set_)
    for name in packet.overloads()
)
#: Writes that a schema does not say: name of the op -> positions of the arguments.
_UNSAID: Final = {
    "aten::native_batch_norm": (3, 4),
    "aten::cudnn_batch_norm": (3, 4),
    "aten::miopen_batch_norm": (3, 4),
}


class Recorder(TorchDispatchMode):
    """While it is on: what runs in this thread, as operations in the order of running.

    Args:
        reference: the dtype of the reference, in which each op runs a second time, beside the run.
        shadows: low copies of weights that may be written again before they are read.

    Attributes:
        memory: what they read and wrote, in both.
        operations: all that made or changed memory.
        skipped: names of ops on what is no plain memory (sparse tensors), or that give memory another size: what they
            give is taken for exact.
        outgrown: names of ops whose shapes depend on values, and would be others in the reference: it keeps the run's.
    """

    def __init__(self, reference: torch.dtype, shadows: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.memory = Memory(reference)
        self.operations: list[Operation] = []
        self.skipped: set[str] = set()
        self.outgrown: set[str] = set()
        self._nodes: list[Origin] = []
        self._by_sequence: dict[int, Origin] = {}
        self._old_shadows = {storage_key(shadow) for shadow in shadows}
        self._unread: dict[int, tuple[str, Tensor, Tensor]] = {}  # storage -> path of a weight, weight, its shadow

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Without this, dynamo runs no compiled code below the mode, and skips the frame for good."""
        return True

    def look(self, node: NodeOf, run: Callable[[], Any]) -> Any:
        """For ``node_by_node``: what runs meanwhile belongs to the node."""
        self._nodes.append(Origin("node", node.name, node.graph, node=node.node))
        try:
            return run()
        finally:
            self._nodes.pop()

    def add_shadows(self, masters: Mapping[str, Tensor], shadows: Mapping[str, Tensor]) -> None:
        """Before a program runs: the low copies of weights belong to these, also where they were made before this run.

        Args:
            masters: path in the model -> weight, of all.
            shadows: path -> low copy, of those that the program reads.
        """
        keys = {storage_key(shadow): (path, masters[path], shadow) for path, shadow in shadows.items()}
        made = {key for key in keys if not self.memory.knows(keys[key][2])}
        for number, operation in reversed([*enumerate(self.operations)]):
            key = operation.outputs[0].storage
            if key in keys and operation.origin.kind == "outside":
                if operation.fresh:
                    del self.operations[number]
                    self.memory.forget(operation.outputs[0])
                    made.add(key)
                else:
                    self.operations[number] = replace(operation, origin=Origin("weight", keys[key][0]))
        self._unread |= {key: keys[key] for key in made}

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(kind not in _PLAIN for kind in types):
            return NotImplemented  # a subclass runs as ops on what it holds
        kwargs = kwargs or {}
        if func is aten_foreach_copy_:
            for target, source in zip(args[0], args[1], strict=True):
                if storage_key(target) in self._old_shadows and not self.memory.knows(target):
                    func([target], [source])  # ``add_shadows`` notes it, once an op reads it
                else:
                    self._record(_copy_, (target, source), {})
            return None
        return self._record(func, args, kwargs)

    def _record(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        memory = self.memory
        leaves, spec = tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        origin = self._origin(function)
        if not all(map(_is_plain, tensors)) or function in _RESIZES:
            self.skipped.add(function.name())
            for leaf in tensors if function in _RESIZES else ():
                memory.forget(memory.place(leaf))
            return function(*args, **kwargs)
        for leaf in tensors if self._unread else ():
            if (shadow := self._unread.pop(storage_key(leaf), None)) is not None:
                self._add_cast(*shadow)
        places = [memory.place(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        ids = _written(function, args, kwargs)
        written = [number for number, leaf in enumerate(leaves) if id(leaf) in ids]
        before = tuple((memory.low(places[n]).clone(), memory.exact(places[n]).clone()) for n in written)
        for number in written:
            memory.prepare_write(places[number])
        # Integers have no memory of the reference's own as long as they are the same: what is written is kept aside.
        shared = {places[n].storage for n in written if not places[n].is_float}
        aside = {p: memory.exact(p).clone() for p in places if isinstance(p, Place) and p.storage in shared}
        output = function(*args, **kwargs)
        results = tree_leaves(output)
        fresh = [
            number
            for number, result in enumerate(results)
            if isinstance(result, Tensor) and _is_plain(result) and not memory.knows(result)
        ]
        if not all(_is_plain(result) for result in results if isinstance(result, Tensor)):
            self.skipped.add(function.name())
        if fresh or written:
            outputs = (*(memory.place(results[n]) for n in fresh), *(places[n] for n in written))
            made = Operation(function, tuple(places), spec, tuple(fresh), tuple(written), outputs, before, origin)
            self._add(made, aside)
        return output

    def _add(self, operation: Operation, aside: Mapping[Place, Tensor]) -> None:
        """Run it in the reference as well; ``aside``: what stood in memory that the run has written meanwhile."""
        memory = self.memory

        def read(place: Place, written: bool) -> Tensor:
            value = aside[place] if place in aside else memory.exact(place)
            return value.clone() if written else value

        if operation.keeps_values and memory.share(*operation.outputs, operation.leaves[0]):
            self.operations.append(operation)
            return
        with torch.no_grad():
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

    def _add_cast(self, path: str, weight: Tensor, shadow: Tensor) -> None:
        source, place = self.memory.place(weight.detach()), self.memory.place(shadow.detach())
        leaves, spec = tree_flatten(((source,), {"dtype": shadow.dtype}), is_leaf=_is_place)
        self._add(Operation(aten_to_copy, tuple(leaves), spec, (0,), (), (place,), (), Origin("weight", path)), {})

    def _origin(self, function: Any) -> Origin:
        node = current_autograd_node()
        if self._nodes:
            origin = self._nodes[-1]
        elif node is not None and not torch.is_grad_enabled():
            known = self._by_sequence.get(sequence_number(node))
            return replace(known, backward=True) if known else Origin("outside", node.name(), backward=True)
        else:
            file, line = user_line()
            origin = Origin("outside", function.name().partition("::")[2].partition(".")[0], source=f"{file}:{line}")
        if torch.is_grad_enabled():  # the function of its backward was made just before
            self._by_sequence[sequence_number() - 1] = origin
        return origin


def _is_plain(tensor: Tensor) -> bool:
    """Whether it lies in memory element by element."""
    return tensor.layout is torch.strided


def _is_place(leaf: Any) -> bool:
    return isinstance(leaf, Place)


def _written(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> set[int]:
    """Ids of the tensors that a call writes to."""
    unsaid = _UNSAID.get(function.name().partition(".")[0], ())
    found: list[Any] = [args[position] for position in unsaid if len(args) > position]
    for position, argument in enumerate(schema_of(function).arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[position] if position < len(args) and not argument.kwarg_only else kwargs.get(argument.name)
            found += given if isinstance(given, list | tuple) else [given]
    return {id(each) for each in found if isinstance(each, Tensor)}


def record(model: nn.Module, run: Callable[[], Any], reference: torch.dtype) -> tuple[Recorder, Any] | None:
    """Run something on a converted model and write it down; and what it gives. None: it is to be run once more.

    Args:
        run: calls the model. Where a call captured a graph, that ran before it could be taken apart.
        reference: the dtype of the reference.
    """
    conversion, weights = conversion_of(model), dict(model.named_parameters(remove_duplicate=False))
    shadows = [shadow for shadow in conversion.store.shadows_of([*weights.values()]) if shadow is not None]
    captures, recorder = conversion.captures, Recorder(reference, shadows)
    with node_by_node(model, recorder.look, lambda shadows: recorder.add_shadows(weights, shadows)), recorder:
        result = run()
    return (recorder, result) if captures == conversion.captures else None
