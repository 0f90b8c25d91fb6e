"""What is known of the calls that ran a graph of dynamo."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.fx import GraphModule

from fxprec.programs.call_form import CallForm, NoForm, Placeholder

#: Whether each of the modules in one is training.
Modes = tuple[bool, ...]


def modes_of(module: nn.Module) -> Modes:
    """Return the modes of a module and of all in it. (What TorchScript froze has none.)"""
    return tuple([getattr(each, "training", False) for each in module.modules()])


@dataclass(slots=True, eq=False, weakref_slot=True)
class Calls:
    """The calls that ran one graph of dynamo.

    Attributes:
        part: why the graph is a part of the method only; "" where it is the whole.
        placeholders: what dynamo said of its inputs.
        modes: of the method's module, in such calls.
        number: of the last of them, among all calls of the method.
        looked_at: one has gone through.
        form: how the method was called, and what it gave; None: the graph cannot be called so.
        why_not: and why.
    """

    part: str
    placeholders: tuple[Placeholder, ...]
    modes: set[Modes] = field(default_factory=set)
    number: int = 0
    looked_at: bool = False
    form: CallForm | None = None
    why_not: str = ""
    _training: bool | None = None

    @classmethod
    def of(cls, gm: GraphModule, part: str) -> Calls:
        """``gm``: before it is rewritten."""
        return cls(part, tuple(map(Placeholder.of, gm.graph.find_nodes(op="placeholder"))))

    def note_mode(self, module: nn.Module, closely: bool) -> None:
        """A call of this module ran it; ``closely``: the modes of those in it may have changed, and not its own."""
        if closely or module.training is not self._training:
            self._training = module.training
            self.modes.add(modes_of(module))

    def look(self, form_of: Callable[[Sequence[Placeholder]], CallForm]) -> None:
        """Note that a call has gone through; ``form_of``: its form, from what dynamo said of the inputs, or NoForm."""
        self.looked_at = True
        if self.part:
            return
        try:
            self.form = form_of(self.placeholders)
        except NoForm as why:
            self.why_not = str(why)


_Run = tuple[Calls, Sequence[Any], Sequence[Any]]


class Ran(threading.local):
    """The graphs that ran in the call that goes on, each with its inputs and results; the latter while they matter."""

    def __init__(self) -> None:
        self._runs: list[_Run] | None = None
        self._in_the_last: frozenset[int] = frozenset()

    @contextlib.contextmanager
    def noted(self) -> Iterator[list[_Run]]:
        """The list, during one call."""
        before, self._runs = self._runs, []
        try:
            yield self._runs
        finally:
            self._in_the_last = frozenset(id(calls) for calls, _, _ in self._runs)
            self._runs = before

    def is_other(self, calls: Calls | None) -> bool:
        """Return whether the last call did not run that graph: an argument, or something of the model, is another."""
        return id(calls) not in self._in_the_last

    def append(self, calls: Calls | None, inputs: Sequence[Any], results: Sequence[Any]) -> None:
        """A graph ran; ``calls``: None where nobody knows it any more."""
        if self._runs is not None and calls is not None:
            self._runs.append((calls, (), ()) if calls.looked_at else (calls, inputs, results))
