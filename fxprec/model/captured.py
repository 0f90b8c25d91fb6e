"""The list of rewritten graphs of one converted model, with queries: by method, by mode, by last call."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Container, Iterable
from dataclasses import dataclass

from torch import nn
from torch.fx import GraphModule

from fxprec.capture.call_key import Key
from fxprec.capture.symbolic.guards import Guards
from fxprec.model.method import Method
from fxprec.passes.graph.annotations import notes, weight_path
from fxprec.programs.call_form import CallForm, form_of_key
from fxprec.programs.dynamo_programs import Calls, modes_of
from fxprec.programs.program import Program


@dataclass(frozen=True, slots=True, eq=False)
class Captured:
    """Rewritten graph of a method, or of a piece of it between two graph breaks.

    Attributes:
        method: its name, as ``MethodName`` writes it.
        entry: ``number`` of the entry point that it serves: that of the class, or of a function set on the instance.
        gm: the graph that users see.
        program: what runs for it.
        training: the mode that the method's module was in.
        gradients: whether grad mode was on at capture. If it was off, a call with grad mode on needs another graph: the
            passes may drop gradients of what is returned.
        guards: what static capture read; None for a graph of dynamo, which guards by itself.
        key: of a static graph: names of the tensor arguments, and the values of the others, constants in the graph.
        calls: of a graph of dynamo: what is known of the calls that ran it.
    """

    method: str
    entry: int
    gm: GraphModule
    program: Program
    training: bool
    gradients: bool
    guards: Guards | None = None
    key: Key | None = None
    calls: Calls | None = None

    def fits(self, owner: nn.Module) -> bool:
        """Return whether a call of the method's module, in the modes that it and its parts are in, may run it."""
        # dynamo's guards cannot be asked: what is known is in which modes of the modules its graph ran before.
        if self.calls is not None:
            return modes_of(owner) in self.calls.modes
        return self.guards is None or self.guards.hold()

    def reads_dtypes_of(self, model: nn.Module, frozen: Container[str]) -> bool:
        """Return whether weights have the dtypes that the graph was captured with; those in ``frozen`` became low."""
        tensors = dict(model.named_parameters(remove_duplicate=False))
        for node in self.gm.graph.find_nodes(op="get_attr"):
            path = weight_path(node)
            known = path in tensors and path not in frozen and notes(node).kind == "parameter"
            if known and node.meta.get("dtype", tensors[path].dtype) != tensors[path].dtype:
                return False
        return True


class CapturedGraphs(list[Captured]):
    """The graphs that calls can reach, in the order of their capture.

    ``StaticGraphs`` has the static ones a second time, by key: whoever removes one there must ``drop`` it here.
    """

    def __init__(self) -> None:
        super().__init__()
        #: Numbers of methods that nobody can call any more. Finalizers append, at any time.
        self._gone: list[int] = []

    def drop(self, dead: Collection[Captured]) -> None:
        """Forget graphs that no call can reach any more."""
        self[:] = [captured for captured in self if captured not in dead]

    def forget_with(self, function: Callable[..., object], method: Method) -> None:
        """Forget the graphs of a method, by ``drop_gone``, once ``function``, which runs it, is collected."""
        weakref.finalize(function, self._gone.append, method.number).atexit = False

    def drop_gone(self) -> None:
        """Forget the graphs of functions that nobody can call any more."""
        while self._gone:
            number = self._gone.pop()
            self[:] = [captured for captured in self if captured.entry != number]

    def of(self, method: Method) -> list[Captured]:
        """Return those of one method."""
        return [captured for captured in self if captured.entry == method.number]

    def reached(self, methods: Iterable[tuple[Method, Method | None]]) -> list[Captured]:
        """Return those that calls of the methods run.

        Args:
            methods: each with what a call of it enters now: itself, a function set on the instance, or nothing (None).
        """
        self.drop_gone()
        numbers: set[int] = set()
        for method, active in methods:
            if active is not None:
                numbers.add(active.number)
            # A function set on the instance may call the class's method, whose graphs then run. Once the function has
            # graphs of its own, these have the class's method inlined, and its own graphs are not reached.
            if active is None or not self.of(active):
                numbers.add(method.number)
        return [captured for captured in self if captured.entry in numbers]

    def lowered_weights(self, model: nn.Module) -> list[str]:
        """Return the names of the parameters that every graph so far reads in the low dtype only."""
        tensors = dict(model.named_parameters(remove_duplicate=False))
        low = {id(tensors.get(name)) for captured in self for name in captured.program.low}
        plain = {id(tensors.get(name)) for captured in self for name in captured.program.plain}
        return [name for name, value in model.named_parameters() if id(value) in low - plain]


def form_of(captured: Captured, methods: Iterable[Method]) -> CallForm | None:
    """Return how a graph of one of these methods is called.

    None for a graph of dynamo that takes and gives plain tensors, not the method's arguments and result; and for a
    static graph of another method.
    """
    if captured.calls is not None:
        return captured.calls.form
    method = next((each for each in methods if each.number == captured.entry), None)
    return None if method is None or captured.key is None else form_of_key(method.signature, *captured.key)


def in_present_mode(among: Iterable[Captured], methods: Iterable[Method]) -> list[Captured]:
    """Return the graphs of the mode (training or not) that their method's module is in; where there is none, all."""
    among = [*among]
    # Of a method without a graph for the present mode, those of the other mode are better than none.
    training = {method.number: owner.training for method in methods if (owner := method.owner()) is not None}
    fit = [captured for captured in among if training.get(captured.entry) == captured.training]
    some = {captured.entry for captured in fit}
    return [captured for captured in among if captured in fit or captured.entry not in some]


def of_last_call(among: Iterable[Captured], by_dynamo: Container[int]) -> list[Captured]:
    """Return for each method the graphs of its last call: an earlier one, of other sizes, may have run others.

    Of static graphs, each of which is of a whole method, that is the one captured last; of dynamo's, those with the
    number of the latest call that ran any.

    Args:
        among: of these graphs.
        by_dynamo: numbers of the methods whose last call dynamo took: some methods have graphs of both kinds, as where
            an argument is an object now and then.
    """
    among = [*among]
    static = {captured.entry for captured in among if captured.calls is None}
    last: dict[int, int] = {}
    numbered: list[tuple[int, Captured]] = []
    for position, captured in enumerate(among):
        number = position
        if captured.calls is not None:
            if captured.entry in static and captured.entry not in by_dynamo:
                continue
            number = len(among) + captured.calls.number  # above all positions: static ones do not count beside it
        numbered.append((number, captured))
        last[captured.entry] = max(number, last.get(captured.entry, 0))
    return [captured for number, captured in numbered if number == last[captured.entry]]
