"""Keep the programs of one graph of dynamo, and what is known of the calls that ran it.

What runs on the arguments that dynamo passes depends on how these share memory. Dynamo tells apart two inputs that are
one tensor, but not a view of another input, nor two buffers in one storage. A graph that writes to such memory is
rewritten again when arguments come that share memory in another way.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, Final

from torch import nn
from torch.fx import GraphModule

from fxprec.capture.capturing import CAPTURING, fewer_collections
from fxprec.capture.dynamo.graph import Arguments
from fxprec.kernels.launch.observers import unwatched
from fxprec.programs.call_form import CallForm, NoForm, Placeholder
from fxprec.programs.memory import SharedMemory, constants_of
from fxprec.programs.program import Program
from fxprec.shadows import ShadowStore

#: Whether each of the modules in one is training.
Modes = tuple[bool, ...]

#: Ways of sharing memory that have a program of their own each; one that serves them all comes next.
_MOST: Final = 8
_Picker = Callable[[tuple[Any, ...]], tuple[Any, ...]]


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
        number: of the latest call that ran it; all calls of the method are counted.
        looked_at: such a call has gone through, and its form was looked for.
        form: how the method was called, and what it gave; None: the graph cannot be called so.
        why_not: why not, where the graph is the whole of the method, and a call was looked at.
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
        """Make it for a graph; ``gm``: before it is rewritten."""
        return cls(part, tuple(map(Placeholder.of, gm.graph.find_nodes(op="placeholder"))))

    def note_mode(self, module: nn.Module, closely: bool) -> None:
        """Note a call of this module that ran it: the modes of all modules, if its own is another than at the last one.

        ``closely``: in any case, since the modes of modules in it may have changed alone.
        """
        # To list all modes takes longer than many a call.
        if closely or module.training is not self._training:
            self._training = module.training
            self.modes.add(modes_of(module))

    def look(self, form_of: Callable[[Sequence[Placeholder]], CallForm]) -> None:
        """Note that a call has gone through; ``form_of``: makes its form from the placeholders, or raises NoForm."""
        self.looked_at = True
        if self.part:
            return
        try:
            self.form = form_of(self.placeholders)
        except NoForm as why:
            self.why_not = str(why)


_Run = tuple[Calls, Sequence[Any], Sequence[Any]]


class Ran(threading.local):
    """The graphs that ran in the call that goes on, in this thread, each with its inputs and results.

    Inputs and results, which may be large, are there only until the form of the graph is known.
    """

    def __init__(self) -> None:
        self._runs: list[_Run] | None = None
        self._in_the_last: frozenset[int] = frozenset()

    @contextlib.contextmanager
    def noted(self) -> Iterator[list[_Run]]:
        """Yield the list of graphs that run during one call."""
        before, self._runs = self._runs, []
        try:
            yield self._runs
        finally:
            self._in_the_last = frozenset(id(calls) for calls, _, _ in self._runs)
            self._runs = before

    def is_other(self, calls: Calls | None) -> bool:
        """Return whether the last call did not run this graph: then an argument, or the model's state, is another."""
        return id(calls) not in self._in_the_last

    def append(self, calls: Calls | None, inputs: Sequence[Any], results: Sequence[Any]) -> None:
        """Note a graph that ran; ``calls``: None where nobody knows it any more."""
        if self._runs is not None and calls is not None:
            self._runs.append((calls, (), ()) if calls.looked_at else (calls, inputs, results))


@dataclass(frozen=True, slots=True, eq=False)
class ArgumentProgram:
    """A program, and where its arguments are among those that dynamo passes.

    Attributes:
        watched: the weights for which it matters how they share memory.
        memory: how they and the inputs do; None: the program writes to none of them, or is right for all.
        calls: weakly, what is known of the calls that ran it: it holds tensors of the model.
    """

    program: Program
    low: _Picker
    plain: _Picker
    inputs: _Picker
    watched: _Picker
    memory: SharedMemory | None
    calls: weakref.ref[Calls]

    @classmethod
    def of(
        cls, program: Program, positions: Arguments, arguments: Sequence[Any], any_memory: bool, calls: Calls
    ) -> ArgumentProgram:
        """Find a program's arguments among dynamo's.

        Args:
            program: that was made.
            positions: of weights and inputs among dynamo's arguments.
            arguments: those that the graph was rewritten for.
            any_memory: it is right however they lie.
            calls: that ran it.
        """
        read = (program.low, program.plain, (*program.low, *program.watched))
        low, plain, watched = (_picker([positions.weights[name] for name in names]) for names in read)
        inputs, given = _picker(positions.inputs), tuple(arguments)
        # Only a program that writes to its arguments can be wrong for others that share memory otherwise.
        memory = None
        if program.writes and not any_memory:
            memory = SharedMemory(watched(given), constants_of(program.gm), inputs(given))
        return cls(program, low, plain, inputs, watched, memory, weakref.ref(calls))

    def serves(self, arguments: tuple[Any, ...]) -> bool:
        """Return whether these share memory as those did that the graph was rewritten for."""
        return self.memory is None or self.memory.holds(self.watched(arguments), self.inputs(arguments))

    def run(self, store: ShadowStore, arguments: tuple[Any, ...], ran: Ran) -> Any:
        """Run the program on the weights as they are now."""
        calls = self.calls()
        # What made it another one may have written weights unseen: adapters merged into them.
        if ran.is_other(calls):
            store.mark_stale()
        low, inputs = store.read(self.low(arguments)), self.inputs(arguments)
        try:
            results = self.program.function(*low, *self.plain(arguments), *inputs)
        finally:
            if self.program.writes_weights:
                store.mark_stale()
        ran.append(calls, inputs, results)
        return results


class ProgramsByMemory:
    """The programs of a graph: one, or several where it writes to its arguments.

    Args:
        gm: dynamo's graph, as it was before it was rewritten; None: the first program serves all arguments.
        rewrite: called with the graph, arguments and ``any_memory``, makes the program for arguments that share memory
            as these do; ``any_memory``: for all, however they share it.
        first: the program for the arguments that it was captured with.
    """

    def __init__(
        self,
        gm: GraphModule | None,
        rewrite: Callable[[GraphModule, Sequence[Any], bool], ArgumentProgram],
        first: ArgumentProgram,
    ) -> None:
        self._gm, self._rewrite, self._programs = gm, rewrite, [first]

    def serving(self, arguments: tuple[Any, ...]) -> ArgumentProgram:
        """Return the program for arguments that share memory as these do."""
        if self._gm is None:
            return self._programs[0]
        # Mostly the first one serves: arguments share memory as before.
        if (found := self._found(arguments)) is not None:
            return found
        with CAPTURING, unwatched(), fewer_collections():
            if (found := self._found(arguments)) is None:  # else another thread made it in the meantime
                found = self._rewrite(self._gm, arguments, len(self._programs) >= _MOST)
                self._programs.append(found)
        return found

    def _found(self, arguments: tuple[Any, ...]) -> ArgumentProgram | None:
        return next((each for each in self._programs if each.serves(arguments)), None)


def _picker(positions: Sequence[int]) -> _Picker:
    """Return ``itemgetter``, but one that gives a tuple for none or one position, too."""
    if len(positions) > 1:
        return itemgetter(*positions)
    return lambda arguments: tuple([arguments[position] for position in positions])
