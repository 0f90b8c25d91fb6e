"""Run a converted model's graphs node by node, and attribute every op that runs to its node.

::

    with node_by_node(model, watcher):     # watcher.look(node, run) -> run()
        model(x)                           # the same kernels on the same values, one node after another

Ops are seen as torch's dispatcher sees them: below autograd, above the kernels. In the forward an op belongs to the
node that is computed; in the backward to the node whose autograd function runs, which torch's sequence numbers tell.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor, nn

from fxprec.capture.user_code import user_line
from fxprec.inspection.nodes import NamedNode, NodeByNode
from fxprec.model.conversion import conversion_of
from fxprec.passes.torch_internals import schema_of
from fxprec.programs.program import Program, without_autocast
from fxprec.tape.operation import OpOrigin
from fxprec.torch_internals import OpMode, current_autograd_node, sequence_number

_PLAIN: Final = (Tensor, torch.nn.Parameter)
#: Writes that a schema does not say: name of the op -> positions of the arguments.
_UNSAID: Final = {f"aten::{of}_batch_norm": (3, 4) for of in ("native", "cudnn", "miopen")}


@contextlib.contextmanager
def node_by_node(model: nn.Module, watcher: Attribution, opened: bool = False) -> Iterator[None]:
    """Run a converted model's graphs node by node in the block: in calls of this thread, if captured before.

    Compiled graphs (``executor="inductor"``) run op by op as well. ``opened``: fused regions, too, whose kernels then
    do not run: their nodes have the names that they would have without fusion.
    """
    conversion = conversion_of(model)
    with contextlib.ExitStack() as undo:
        for graph, captured in enumerate(conversion.captured):
            # Programs are frozen, since nothing else may change one: for the block their function is another.
            program = captured.program
            undo.callback(object.__setattr__, program, "function", program.function)
            stepwise = _in_steps(program, graph, watcher, opened, conversion.settings.device)
            object.__setattr__(program, "function", stepwise)
        yield


def _in_steps(program: Program, graph: int, watcher: Attribution, opened: bool, device: str) -> Callable[..., Any]:
    interpreter = NodeByNode(program.gm, watcher.look, graph, opened=opened)
    function, own = program.function, threading.get_ident()

    def run(*args: Any) -> Any:
        watcher.begin(dict(zip(program.low, args, strict=False)))
        return interpreter.run(*args)

    here = without_autocast(run, device)
    # A data loader's thread, or a server's, goes on with the program as it was.
    return lambda *args: (here if threading.get_ident() == own else function)(*args)


class Attribution(OpMode):
    """Dispatch mode that gives each op of this thread to ``op``, with its origin. ``observe`` turns it on."""

    def __init__(self) -> None:
        super().__init__()
        self._nodes: list[OpOrigin] = []
        self._by_sequence: dict[int, OpOrigin] = {}

    def op(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], origin: OpOrigin) -> Any:
        """Run an op and return its result."""
        raise NotImplementedError

    def begin(self, shadows: Mapping[str, Tensor]) -> None:
        """Begin a program; ``shadows``: path in the model -> low copy, of the weights that it reads low."""

    def look(self, node: NamedNode, run: Callable[[], Any]) -> Any:
        """Run a node; ops that run meanwhile belong to it."""
        # Sequence numbers that autograd gives out meanwhile are those of this node's backward.
        origin, first = OpOrigin("node", node.name, node.graph, node=node.node), sequence_number()
        self._nodes.append(origin)
        try:
            return run()
        finally:
            self._nodes.pop()
            for number in range(first, sequence_number()):  # an autograd.Function runs its ops without gradients
                self._by_sequence.setdefault(number, origin)

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(kind not in _PLAIN for kind in types):
            return NotImplemented  # a subclass runs as ops on what it holds
        return self.op(func, args, kwargs or {}, self._origin(func))

    def _origin(self, function: Any) -> OpOrigin:
        # Autograd numbers its functions in the order of the forward: the number tells which op's backward this is.
        node = current_autograd_node()
        backward = node is not None and not torch.is_grad_enabled()  # and no checkpoint that computes its body again
        if self._nodes:
            origin = replace(self._nodes[-1], backward=backward)  # of a body that is a backward, say
        elif node is not None and backward:
            known = self._by_sequence.get(sequence_number(node)) or OpOrigin("outside", node.name())
            if known.kind == "outside" and isinstance(node, torch.autograd.function.BackwardCFunction):
                known = replace(known, source=_user_source())  # its backward is the user's code
            return replace(known, backward=True)
        else:
            origin = OpOrigin("outside", function.name().partition("::")[2].partition(".")[0], source=_user_source())
        if torch.is_grad_enabled():  # the function of its backward was made just before, if it has one
            self._by_sequence.setdefault(sequence_number() - 1, origin)
        return origin


def _user_source() -> str:
    file, line = user_line()
    return f"{file}:{line}"


def written_by(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> set[int]:
    """Return the ids of the tensors that a call writes to."""
    # torch's schema does not mark running statistics as written, and they are.
    unsaid = _UNSAID.get(function.name().partition(".")[0], ())
    # Batch norm's schema does not say that it writes its running statistics.
    found: list[Any] = [args[position] for position in unsaid if len(args) > position]
    for position, argument in enumerate(schema_of(function).arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[position] if position < len(args) and not argument.kwarg_only else kwargs.get(argument.name)
            found += given if isinstance(given, list | tuple) else [given]
    return {id(each) for each in found if isinstance(each, Tensor)}


def observe(model: nn.Module, watcher: Attribution, run: Callable[[], Any], opened: bool = False) -> tuple[Any] | None:
    """Run something that calls a converted model under an attribution; None where it is to be run once more.

    That is where a call captured a graph, which ran before it could be taken apart. ``opened``: as of ``node_by_node``.
    """
    conversion = conversion_of(model)
    captures = conversion.captures
    with node_by_node(model, watcher, opened), watcher:
        result = run()
    return (result,) if captures == conversion.captures else None
