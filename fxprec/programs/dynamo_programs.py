"""The programs of one graph of dynamo: what runs on the arguments that dynamo passes, by how these share memory.

Dynamo tells apart two inputs that are one tensor, but not a view of another input, nor two buffers in one storage. A
graph that writes to such memory is rewritten again when arguments come that share memory in another way.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, Final

from torch.fx import GraphModule

from fxprec.capture.capturing import CAPTURING, fewer_collections
from fxprec.capture.dynamo.graph import Arguments
from fxprec.kernels.launch.observers import unwatched
from fxprec.programs.calls import Calls, Ran
from fxprec.programs.memory import SharedMemory, constants_of
from fxprec.programs.program import Program
from fxprec.shadows import ShadowStore

#: Ways of sharing memory that have a program of their own each; one that serves them all comes next.
_MOST: Final = 8

_Picker = Callable[[tuple[Any, ...]], tuple[Any, ...]]


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
        """``arguments``: those that the graph was rewritten for; ``any_memory``: it is right however they lie."""
        read = (program.low, program.plain, (*program.low, *program.watched))
        low, plain, watched = (_picker([positions.weights[name] for name in names]) for names in read)
        inputs, given = _picker(positions.inputs), tuple(arguments)
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
        if ran.is_other(calls):  # what made it another one may have written weights unseen: adapters merged into them
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
        rewrite: makes the program for arguments, or for any arguments that share memory in whatever way.
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
        """The program for arguments that share memory as these do."""
        if self._gm is None:
            return self._programs[0]
        found = next((each for each in self._programs if each.serves(arguments)), None)
        if found is not None:
            return found
        with CAPTURING, unwatched(), fewer_collections():
            made = self._rewrite(self._gm, arguments, len(self._programs) >= _MOST)
            self._programs.append(made)
        return made


def _picker(positions: Sequence[int]) -> _Picker:
    """``itemgetter``, but for none or one position a tuple too."""
    if len(positions) > 1:
        return itemgetter(*positions)
    return lambda arguments: tuple([arguments[position] for position in positions])
