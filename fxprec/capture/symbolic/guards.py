"""Guards of a static trace: what it read of the model, as facts that each call compares.

Compared are

- attributes that are no tensors (``training``, ``eps``, ``scale``), globals, closure variables, attributes of classes:
  the very same object, or one of the same type that no program can tell from it; containers with all that is in them;
- children, and which tensor slots hold a parameter, a tensor or None (not which tensor: those are read at each call);
- classes and their ``forward``, methods overridden on an instance, attributes that were asked for and missing, names
  of tensors and children that an attribute of the instance or of its class hides;
- hooks, global ones too; tied weights, still tied; shape or device of parameters, where they were asked for;
- the code of the functions that were traced, and torch's default dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import attrgetter, call, is_, itemgetter
from types import FunctionType
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from fxprec.capture.facts import (
    PARTS,
    PARTS_OF_PROGRAMS,
    CapturedFacts,
    Expected,
    Fact,
    Lookups,
    Ties,
    as_expected,
    fact_of,
    function_parts,
    none_found,
    says,
    unchanged_functions,
)
from fxprec.capture.originals import original_class
from fxprec.capture.user_code import is_torchs
from fxprec.torch_internals import global_hooks

#: Attributes of a module that hold hooks which run when it is called.
HOOKS: Final = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
#: Of the attributes of a module, a tuple of them.
hooks_of: Final = itemgetter(*HOOKS)


class Slot(NamedTuple):
    """Place of a tensor: the dict of a module that holds it, its name there, and its path in the model."""

    owner: dict[str, Any]
    name: str
    path: str

    def tensor(self) -> Any:
        return self.owner.get(self.name)


_END: Final = object()

#: Something that was asked of the tensor in a slot, and the answer.
Asked = tuple[Slot, Callable[[Tensor], Any], Any]


@dataclass(eq=False)
class Reads:
    """Record of what was read of one module: ``values`` and ``tensors`` of the instance.

    ``of_class``: names found on the class, which the instance must not hide. ``absent``: names found nowhere.
    ``walked``: which of ``_modules``, ``_parameters``, ``_buffers`` were read as a whole (``children()``, ``len``).
    """

    path: str
    module: nn.Module
    called: bool = False
    values: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    of_class: set[str] = field(default_factory=set)
    absent: set[str] = field(default_factory=set)
    walked: set[str] = field(default_factory=set)

    def label(self, name: str) -> str:
        return f"{self.path}.{name}" if self.path else name


class Guards(CapturedFacts):
    """The facts for which alone a static graph holds.

    Args:
        root: the traced module.
        reads: what was read of each module.
        expected, others: what was read outside of the modules.
        functions: those that were traced.
        ties: slots that hold one tensor.
        asked: what was asked of parameters and buffers.
    """

    def __init__(
        self,
        root: nn.Module,
        reads: Sequence[Reads],
        expected: Sequence[Expected] = (),
        functions: Sequence[FunctionType] = (),
        others: Iterable[Fact] = (),
        ties: Sequence[tuple[Slot, Slot]] = (),
        asked: Sequence[Asked] = (),
    ) -> None:
        # The root's own class and hooks are the caller's: a converted module's class is swapped, and its hooks run
        # around the graph.
        inner = [read for read in reads if read.module is not root]
        called = [read for read in inner if read.called]
        values = [*_values_of(reads), *expected]
        parts = [part for read in reads for part in _parts_of(read, hooked=read.called and read.module is not root)]
        slots = [
            (Slot(vars(read.module), name, read.label(name)), tensor)
            for read in reads
            for name, tensor in read.tensors.items()
        ]
        super().__init__(
            [
                *_classes(inner),
                _hooks(called),
                *_missing(reads),
                *as_expected([*values, *parts]),
                fact_of(_Slots(reads)),
                *_walked(reads),
                fact_of(Lookups(read.module for read in reads)),
                *unchanged_functions({function: function_parts(function) for function in functions}),
                *others,
                Fact(call, torch.get_default_dtype, torch.get_default_dtype(), "torch's default dtype"),
                *_tensors(slots, ties, asked),
            ]
        )
        #: For the report: names of the values and tensors that the user's own code read.
        self.read_by_user = tuple(
            dict.fromkeys(
                [each.label for each in values if each.exact and not isinstance(each.value, PARTS_OF_PROGRAMS)]
                + [slot.path for slot, _ in slots]
            )
        )


def _classes(reads: Sequence[Reads]) -> Iterator[Fact]:
    for read in reads:
        yield Fact(type, read.module, type(read.module), f"the class of {read.path}")
    for cls in dict.fromkeys(original_class(read.module) for read in reads):
        yield Fact(attrgetter("forward"), cls, cls.forward, says(f"{cls.__name__}.forward was replaced"))


def _hooks(called: Sequence[Reads]) -> Fact:
    labels = [*global_hooks, *(read.label(name) for read in called for name in HOOKS)]
    hooks = [*global_hooks.values(), *chain.from_iterable(hooks_of(vars(read.module)) for read in called)]

    def change() -> str:
        return f"{next(label for label, held in zip(labels, hooks, strict=True) if held)} got a hook"

    return Fact(any, hooks, False, change)


def _missing(reads: Sequence[Reads]) -> list[Fact]:
    """Return the facts that names which were found on a class, or nowhere, are not on the instance by now."""
    # A name that was found nowhere may appear in the instance, among its parts, or in a class.
    names = [(vars(read.module), name, read) for read in reads for name in sorted(read.of_class)]
    for read in reads:
        attributes, classes = vars(read.module), original_class(read.module).__mro__
        for name in sorted(read.absent):
            scopes = (attributes, *map(attributes.__getitem__, PARTS), *map(vars, classes))
            names += [(scope, name, read) for scope in scopes]

    def change() -> str:
        return next(f"{read.label(name)} was set" for scope, name, read in names if name in scope)

    # The namespaces' own methods: no Python runs for these at a call.
    return [Fact(scope.__contains__, name, False, change) for scope, name, _ in names]


def _walked(reads: Sequence[Reads]) -> Iterator[Fact]:
    """Yield the names of children, parameters or buffers, in order, of modules that the forward walked through."""
    for read in reads:
        for name in sorted(read.walked):
            part = vars(read.module)[name]
            yield Fact(list, part, [*part], read.label(name))


def _values_of(reads: Iterable[Reads]) -> Iterator[Expected]:
    for read in reads:
        exact = not is_torchs(type(read.module))
        for name, value in read.values.items():
            yield Expected(read.label(name), vars(read.module), name, value, exact and name != "training")


def _parts_of(read: Reads, hooked: bool) -> Iterator[Expected]:
    """Yield guards of a module's children, as a copy, of the dicts of its tensors, and of its hooks if it was called.

    A dict that is compared with itself is equal without a look inside. So of the dicts of tensors and hooks only
    another dict shows (hooks that are added are seen by ``_hooks``, tensors by ``_Slots``). Of the children a copy is
    compared.
    """
    attributes = vars(read.module)
    for name in (*PARTS, *(HOOKS if hooked else ())):
        part = attributes[name]
        if part or name in HOOKS:
            yield _Part(read.label(name), attributes, name, dict(part) if name == "_modules" else part, False)


class _Part(Expected):
    """A dict of a module's that holds its children, its tensors or its hooks."""

    __slots__ = ()

    def change(self) -> str | None:
        now = self.scope.get(self.name)
        if self.name == "_modules":
            path, there = self.label.removesuffix(self.name), now or {}
            changed = (child for child in {**self.value, **there} if self.value.get(child) is not there.get(child))
            return next((f"the submodule {path}{child} was replaced, added or removed" for child in changed), None)
        if self.name not in self.scope:
            return f"{self.label} was deleted"
        if self.name in HOOKS:
            return f"{self.label} got a hook" if now != self.value else None
        return f"{self.label} was replaced" if now is not self.value else None


class _Slots:
    """Parameters and buffers: the type in each slot, NoneType for none, so that a changed bias or a DTensor shows.

    And which of them are one tensor. As long as they are the very tensors of the capture, nothing else is asked.
    """

    def __init__(self, reads: Sequence[Reads]) -> None:
        owners: list[tuple[str, dict[str, Any]]] = [
            (read.label(""), slots)
            for read in reads
            for slots in (vars(read.module)["_parameters"], vars(read.module)["_buffers"])
            if slots
        ]
        self._slots = [slots.values() for _, slots in owners]
        self._labels = [prefix + name for prefix, slots in owners for name in slots]
        # With something at the end, so that one tensor less shows: the comparison stops where one of the two ends.
        self._ended = [*self._slots, (_END,)]
        self._tensors = [*chain.from_iterable(self._ended)]
        self._types = [*map(type, self._now())]
        self._ties = Ties(lambda: owners)

    def _now(self) -> Iterator[Any]:
        return chain.from_iterable(self._slots)

    def hold(self) -> bool:
        if all(map(is_, chain.from_iterable(self._ended), self._tensors)):
            return True
        return [*map(type, self._now())] == self._types and self._ties.hold()

    def change(self) -> str:
        now = [*map(type, self._now())]
        if len(now) != len(self._types):
            return "a parameter or buffer was added or deleted"
        for label, a, b in zip(self._labels, self._types, now, strict=True):
            if a is not b:
                return f"{label} changed from {a.__name__} to {b.__name__}"
        return self._ties.change() or "a parameter or buffer was replaced"


def _tensors(
    identical: Sequence[tuple[Slot, Tensor]], ties: Sequence[tuple[Slot, Slot]], asked: Sequence[Asked]
) -> Iterator[Fact]:
    """Yield what must hold of tensors that are attributes but no buffers, of tied slots, and of what was asked for."""
    if identical:
        yield none_found(
            lambda: [slot for slot, tensor in identical if slot.tensor() is not tensor],
            lambda slot: f"the tensor {slot.path} was replaced",
        )
    if ties:
        yield none_found(
            lambda: [(one, other) for one, other in ties if one.tensor() is not other.tensor()],
            lambda pair: f"{pair[0].path} and {pair[1].path} are no longer the same tensor",
        )
    if asked:
        yield none_found(
            lambda: [(slot, now, then) for slot, ask, then in asked if (now := _answer(slot.tensor(), ask)) != then],
            lambda found: (
                f"{found[0].path} "
                + ("is no tensor any more" if found[1] is _END else f"changed from {found[2]} to {found[1]}")
            ),
        )


def _answer(tensor: Any, ask: Callable[[Tensor], Any]) -> Any:
    return ask(tensor) if isinstance(tensor, Tensor) else _END
